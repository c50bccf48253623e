"""The eviction's side of a prompt's pass: scores layer after layer, then budgets and the entries that stay.

A budget in bytes: heads that keep entries of their own, or entries with more or fewer value groups than the mean, are
counted once they are chosen, and chosen again among fewer where they take too much.

Legend: B batch, L layers, M rows of a layer, h key-value heads, S value groups.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from subtoken_train.engine.modes import InputObserver
from subtoken_train.engine.prompt_pass import Rows, are_finite
from subtoken_train.engine.second_pass import TaskRows, task_view
from subtoken_train.evictions.thresholds import Older, ScoredPrompt, scale_of
from subtoken_train.families.family import Family
from subtoken_train.functional.gather import last_marked, on_device
from subtoken_train.functional.groups import expand_group_mask
from subtoken_train.inference.compression import Compression
from subtoken_train.ledger import kv_budget as kv
from subtoken_train.reducers.base import Reducer
from subtoken_train.types import Batch, Layout, Region, in_compressed_region
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import ABSENT, TaskPlan, View


def entries_for_bytes(
    allowed: float, shape: kv.KVShape, regions_BM: Tensor, competes_BM: Tensor, cut_BM: Tensor, budget: kv.KVBudget
) -> Tensor:
    """Return how many competing entries may stay in a layer, int64 [B], beside all others, which stay."""
    in_region_BM = in_compressed_region(regions_BM)
    cost_BM = torch.zeros(regions_BM.shape, dtype=torch.float64, device=regions_BM.device)
    for thin_BM, channels in ((~cut_BM, 1.0), (cut_BM, budget.key_channels)):
        for own_BM, stored in ((in_region_BM, budget), (~in_region_BM, kv.KVBudget())):
            cost = kv.entry_bytes(shape, replace(stored, key_channels=channels))
            cost_BM = cost_BM.masked_fill(thin_BM & own_BM, cost)
    cost_BM = cost_BM.masked_fill(regions_BM == Region.PADDING, 0)
    fixed_B = (cost_BM * ~competes_BM).sum(-1) + kv.fill_bytes(shape, budget) + kv.basis_bytes(shape, budget)
    fixed_B += kv.channel_index_bytes(shape, budget.key_channels) * cut_BM.any(-1)
    # entries of unlike cost: the dearest are counted first, so that the bytes are never exceeded
    sums_BM = (cost_BM * competes_BM).sort(-1, descending=True).values.cumsum(-1)
    needed_B = (fixed_B + (cost_BM * competes_BM).amax(-1)) * shape.num_layers
    if bool((needed_B > allowed).any()):
        what = "the entries that always stay (text, and one other entry per layer)"
        raise _too_few(allowed, what, int(needed_B.max().ceil()))
    return (sums_BM <= (allowed / shape.num_layers - fixed_B)[:, None]).sum(-1)


def largest_choice(
    choose: Callable[[Tensor | None], list[Tensor]],
    bytes_of: Callable[[list[Tensor]], Tensor],
    most_B: Tensor,
    allowed: float,
) -> list[Tensor]:
    """Find by bisection the choice of most entries, ``most_B`` at most, that takes no more than the bytes.

    ``choose`` returns what stays, per layer bool [B, h, M], when no layer of a sample may keep more than a number of
    competing entries, int64 [B]; None: as many as were counted.
    """
    kept = choose(None)
    fits_B = bytes_of(kept) <= allowed
    if bool(fits_B.all()):
        return kept
    low_B, high_B = torch.where(fits_B, most_B, torch.ones_like(most_B)), most_B
    while bool((low_B < high_B).any()):
        middle_B = (low_B + high_B + 1) // 2
        fits_B = bytes_of(choose(middle_B)) <= allowed
        low_B, high_B = torch.where(fits_B, middle_B, low_B), torch.where(fits_B, high_B, middle_B - 1)
    kept = choose(low_B)
    if bool(((needed_B := bytes_of(kept)) > allowed).any()):
        raise _too_few(allowed, "what always stays plus one entry per head", int(needed_B.max()))
    return kept


def _too_few(allowed: float, what: str, needed: int) -> ValueError:
    return ValueError(f"eviction_keep={int(allowed)} bytes is too small for {what}; it needs at least {needed} bytes")


def prompt_bytes(
    kept_LBhM: list[Tensor],
    masks: Sequence[Tensor | None],
    cuts_LBM: list[Tensor],
    budget: kv.KVBudget,
    shape: kv.KVShape,
    layout: Layout,
) -> Tensor:
    """Count bytes, int64 [B], of chosen entries, [B, h or 1, M] per layer, under ``masks`` [B, M, S] of groups."""
    width, heads, key_channels = shape.head_dim, shape.num_kv_heads, budget.key_channels
    beside, basis = kv.fill_bytes(shape, budget), kv.basis_bytes(shape, budget)
    total_B = torch.zeros_like(kept_LBhM[0][:, 0, 0], dtype=torch.long)
    for kept_BhM, groups_BMS, cut_BM in zip(kept_LBhM, masks, cuts_LBM, strict=True):
        channels_BM1 = torch.where(cut_BM, kv.kept_channels(width, key_channels), width)[..., None]
        if groups_BMS is None:
            channels_BMh = channels_BM1 + width
        else:
            values = expand_group_mask(groups_BMS, shape.value_dim, heads, layout)
            channels_BMh = channels_BM1 + values.view(*groups_BMS.shape[:2], heads, width).sum(-1)
            total_B += beside
        stored_B = (channels_BMh.transpose(1, 2) * kept_BhM.expand(-1, heads, -1)).sum((1, 2))
        total_B += stored_B * shape.element_bytes + kv.channel_index_bytes(shape, key_channels) * cut_BM.any(-1) + basis
    return total_B


@dataclass(frozen=True)
class LastingLayer:
    """A layer's part that evicting while decoding needs; of the competing entries ``budget_B`` may stay, int64."""

    scale: float
    regions_BM: Tensor
    competes_BM: Tensor
    budget_B: Tensor
    carried: Tensor | None


class EvictionPass:
    """The observer of one prompt pass: scores layer after layer, then says what stays.

    ``again_B`` marks the samples whose entries a second pass scores, ``tasks`` are its rows. ``budgets`` are, per layer
    that was kept, what competed (bool [B, M]) and how much of it may stay (int64 [B]). ``groups``: what a routed entry
    stores, for a budget in bytes; None: whole entries.
    """

    def __init__(
        self,
        compression: Compression,
        family: Family,
        prompts: Batch,
        reducer: Reducer | None = None,
        groups: kv.KVBudget | None = None,
    ) -> None:
        assert compression.eviction is not None
        self.groups = kv.KVBudget() if groups is None else groups
        self.compression, self.method, self.family, self.shape = compression, compression.eviction, family, family.shape
        self.followed = prompts.followed
        # text, and what is generated, is whole in both arms: no share of these entries has equal bytes
        mixed = compression.scope == "all" or compression.every is not None
        self.arm = None if mixed or reducer is None else matched_arm(reducer, prompts)
        self.again_B = self.method.second_pass(prompts.regions_BN)
        self.tasks = self.method.tasks(prompts.regions_BN) if bool(self.again_B.any()) else []
        assert not self.tasks or "second_pass" in self.method.needs
        self.scores: dict[int, Scores] = {}
        self.rows: dict[int, Rows] = {}
        self.lasting: dict[int, LastingLayer] = {}
        self.budgets: dict[int, tuple[Tensor, Tensor]] = {}
        self.finite: list[Tensor] = []  # whether what was observed so far is, on the device
        self._older: list[Older] = []
        self._scales: dict[int, float] = {}
        self._input: dict[int, Tensor] = {}
        self._known: MutableMapping[Tensor, tuple[Compression, tuple[Tensor, Tensor, Tensor, Tensor]]]
        self._known = WeakTensorKeyDictionary()

    @property
    def inputs(self) -> InputObserver | None:
        """Observer of what layers project, for a method that reads it; None where it does not."""
        return self._input.__setitem__ if "inputs" in self.method.needs else None

    def observe(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
        """Score one layer."""
        home = self.again_B.device
        self.rows[layer] = on_device(rows, home)
        self._scales[layer] = scale
        self.finite += [are_finite(each) for each in (query, key, value)]
        states = layer, query, key, value, rows.regions_BM, scale, self.method.needs
        view = View(
            *states,
            self.compression.in_scope(rows.regions_BM),
            position=rows.position,
            next_position=rows.next_position,
            rotate=partial(self.family.rotation, layer),
            output_weight=partial(self.family.output_weight, layer),
            attended_BN=rows.attended_BM,
            reach=self.family.window(layer, rows.position),
            budget=partial(self._in_scope_budget, rows.regions_BM),
            input_BND=self._input.pop(layer, ABSENT),
        )
        with torch.autocast(query.device.type, enabled=False):  # scores are fp32
            self.scores[layer] = on_device(self.method.score(view), home)

    def observe_task(self, plan: TaskPlan, task: TaskRows, layer: int, *states: Any) -> None:
        """Score what a task is about in one layer again."""
        first, view = self.scores[layer], task_view(self.family, plan, self.rows[layer], task, layer, *states)
        replaced_B1M = self.again_B[:, None, None] & view.about_BN.to(self.again_B.device)[:, None]
        with torch.autocast(view.about_BN.device.type, enabled=False):
            scores_BhM = self.method.score_task(view).to(replaced_B1M.device)
        first.scores_BhN = torch.where(replaced_B1M, scores_BhM, first.scores_BhN)

    def keep(self, masks: Sequence[Tensor | None] = (), layout: Layout = "contiguous") -> list[Tensor]:
        """Return the entries that stay of the layers seen, each bool [B, h, M] (h = 1: one set for all heads)."""
        order = sorted(self.scores)
        regions = [self.rows[layer].regions_BM for layer in order]
        competes, *counted = map(list, zip(*map(self._budget, regions), strict=True))
        exact, whole, most = map(torch.stack, counted)
        budget = torch.minimum(whole, most)
        exact, scores = torch.minimum(exact.clamp(min=0), most), [self.scores[layer] for layer in order]

        def choose(most_B: Tensor | None) -> list[Tensor]:
            capped, real = (budget, exact) if most_B is None else (budget.minimum(most_B), exact.minimum(most_B))
            for i, layer in enumerate(order if self.compression.every is not None else ()):
                own_B = whole[i] if self.compression.unit == "tokens" else capped[i]  # more than a prompt has
                states = regions[i], competes[i], own_B, scores[i].carried
                self.lasting[layer] = LastingLayer(self._scales[layer], *states)
            self.budgets.update(zip(order, zip(competes, capped, strict=True), strict=True))
            return self._kept(scores, Candidates(regions, competes, capped, real))

        if self.compression.unit != "bytes" or all(mask is None for mask in masks):
            return choose(None)
        cuts = [self.compression.cuts_keys(x) for x in regions]
        stored = self._stored()
        bytes_of = partial(prompt_bytes, masks=masks, cuts_LBM=cuts, budget=stored, shape=self.shape, layout=layout)
        allowed = self.compression.keep * len(order) / self.shape.num_layers
        return largest_choice(choose, bytes_of, budget.amax(0), allowed)

    def _kept(self, scores: list[Scores], candidates: Candidates) -> list[Tensor]:
        if (threshold := self.compression.threshold) is None:
            return self.method.keep(scores, candidates)
        recent = [last_marked(x != Region.PADDING, threshold.window) for x in candidates.regions_LBN]
        kept = threshold.keep(self.method, scores, candidates, recent)
        self._older += map(Older.of, kept, scores, candidates.competes_LBN, recent)
        return kept

    def check_threshold(self, names: list[str]) -> None:
        """Raise ``ValueError`` where a threshold left nothing, or all, of a prompt."""
        if self.compression.threshold is not None and not self.method.decides:
            sum(self._older[1:], self._older[0]).check(self.compression.threshold, names)

    def scored_prompts(self, window: int) -> list[ScoredPrompt]:
        """Return what a threshold with a window would decide on, for each prompt with something in scope."""
        read, own = scale_of(self.method).read, []
        for layer in sorted(self.scores):
            found, regions_BM = self.scores[layer], self.rows[layer].regions_BM
            in_scope_BM = self.compression.in_scope(regions_BM)
            recent_BM = last_marked(regions_BM != Region.PADDING, window)
            older_BM = in_scope_BM & ~(self._last_row(regions_BM) | recent_BM | found.protected_BN)
            own.append((read(found.scores_BhN).cpu(), in_scope_BM.cpu(), older_BM.cpu()))
        prompts = []
        for place in range(len(self.again_B)):
            scores = torch.cat([scores_BhM[place][:, older_BM[place]].flatten() for scores_BhM, _, older_BM in own])
            total = sum(int(in_scope_BM[place].sum()) * scores_BhM.shape[1] for scores_BhM, in_scope_BM, _ in own)
            prompts += [ScoredPrompt(scores, total - len(scores))] if total else []
        return prompts

    def _last_row(self, regions_BM: Tensor) -> Tensor:
        return last_marked(regions_BM != Region.PADDING, int(not self.followed))

    def _in_scope_budget(self, regions_BM: Tensor) -> Tensor:
        """Entries in scope that may stay in a layer, a last row that is in scope among them, int64 [B]."""
        here, regions_BM = regions_BM.device, regions_BM.to(self.again_B.device)
        _, _, whole_B, most_B = self._budget(regions_BM)
        return (torch.minimum(whole_B, most_B) + (self.compression.in_scope(regions_BM).sum(-1) - most_B)).to(here)

    def _budget(self, regions_BM: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what competes in a layer, bool [B, M]; how much may stay, fp64 and int64 [B]; how much competes."""
        own, found = self._known.get(regions_BM, (None, None))
        if found is None or own is not self.compression:
            competes_BM = self.compression.in_scope(regions_BM) & ~self._last_row(regions_BM)
            exact_B = self._exact(regions_BM, competes_BM)
            # the decimal that was written, not its binary neighbours
            whole_B = torch.ceil(exact_B - 1e-9) if self.compression.round_up else torch.floor(exact_B + 1e-9)
            found = competes_BM, exact_B, whole_B.long().clamp(min=1), competes_BM.sum(-1)
            self._known[regions_BM] = self.compression, found
        return found

    def _exact(self, regions_BM: Tensor, competes_BM: Tensor) -> Tensor:
        """Competing entries that may stay in a layer, fp64 [B]; a last row that is in scope takes one of them."""
        keep, count_B = self.compression.keep, self.compression.in_scope(regions_BM).sum(-1)
        if self.compression.unit == "bytes":  # which count what always stays themselves
            cut_BM = self.compression.cuts_keys(regions_BM)
            return entries_for_bytes(keep, self.shape, regions_BM, competes_BM, cut_BM, self._stored()).double()
        share_B = self._promised(count_B)
        if self.arm is not None:
            tokens_B, anchor_B, each = self.arm
            own_B = torch.ceil(torch.floor(self._promised(tokens_B) + 1e-9).clamp(min=1) * each - 1e-9)
            share_B = torch.where(count_B == anchor_B, own_B, share_B)
        return share_B - (count_B - competes_BM.sum(-1))

    def _stored(self) -> kv.KVBudget:
        own = self.compression
        return replace(self.groups, key_channels=own.key_channels, key_axes=own.key_axes)

    def _promised(self, count_B: Tensor) -> Tensor:
        if self.compression.unit == "fraction":
            return count_B.double() * self.compression.keep
        return torch.full_like(count_B, int(self.compression.keep)).double()


def matched_arm(reducer: Reducer, prompts: Batch) -> tuple[Tensor, Tensor, float] | None:
    """Return what arm and matched anchor leave, int64 [B], and a token's share; None: no anchor, or several cuts."""
    if reducer.matches is None or reducer.staged:
        return None
    arm, regions_BN = replace(reducer, keep_ratio=reducer.matches, round_up=False, matches=None), prompts.regions_BN
    tokens = in_compressed_region(regions_BN).sum(-1).tolist()
    counts = [[each.kept_tokens(count) if count else 0 for count in tokens] for each in (arm, reducer)]
    arm_B, anchor_B = torch.tensor(counts, device=regions_BN.device)
    return arm_B, anchor_B, float(reducer.arm_bytes)
