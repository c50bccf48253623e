"""What an eviction sees of a prompt's pass, and what it leaves: scores layer after layer, budgets, entries that stay.

Legend: B batch, L layers, M rows of a layer, h key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from subtoken_train.engine.finite_states import are_finite
from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.evictions.base import Candidates, LayerScores
from subtoken_train.evictions.layer_views import LayerView, TaskView
from subtoken_train.evictions.observers import last_marked
from subtoken_train.evictions.task_plan import TaskPlan
from subtoken_train.families.family import Family
from subtoken_train.functional.gather import take_rows
from subtoken_train.functional.moving import on_device
from subtoken_train.inference.byte_budget import entries_for_bytes, largest_choice, prompt_bytes
from subtoken_train.inference.compression import Compression
from subtoken_train.ledger.kv_budget import KVBudget, fill_bytes
from subtoken_train.reducers.base import Reducer
from subtoken_train.types import Batch, Layout, Region, in_compressed_region


@dataclass
class LastingLayer:
    """What is still needed of a layer where tokens are evicted while decoding.

    Attributes:
        scale: factor of its attention scores.
        regions_BM: ``Region`` codes of its rows.
        competes_BM: those that compete, bool.
        budget_B: competing entries that may stay, int64: what a share or bytes gave for the prompt.
        carried: see ``LayerScores``.
    """

    scale: float
    regions_BM: Tensor
    competes_BM: Tensor = field(init=False)
    budget_B: Tensor = field(init=False)
    carried: Tensor | None = None


class EvictionPass:
    """The observer of one prompt pass: scores layer after layer, then says what stays.

    ``again_B`` marks the samples whose entries a second pass scores (``inference/second_pass.py``), ``tasks`` are its
    rows; none where no sample is marked. ``budgets`` are, per layer that was kept, what competed (bool [B, M]) and how
    much of it may stay (int64 [B]).

    Args:
        compression: with an eviction.
        family: the backbone.
        prompts: whole, or their first part (``followed``), whose last rows may be dropped.
        reducer: the token reducer that the prompts go through; a matched anchor's says what its arm keeps.
        groups: what a routed entry stores, which a budget in bytes counts with; None: whole entries.
    """

    def __init__(
        self,
        compression: Compression,
        family: Family,
        prompts: Batch,
        reducer: Reducer | None = None,
        groups: KVBudget | None = None,
    ) -> None:
        assert compression.eviction is not None
        self.groups = KVBudget() if groups is None else groups
        self.compression, self.method, self.family, self.shape = compression, compression.eviction, family, family.shape
        self.followed = prompts.followed
        # text, and what is generated, is whole in both arms: no share of these entries has equal bytes
        mixed = compression.scope == "all" or compression.every is not None
        self.arm = None if mixed or reducer is None else matched_arm(reducer, prompts)
        self.again_B = self.method.second_pass(prompts.regions_BN)
        self.tasks = self.method.tasks(prompts.regions_BN) if bool(self.again_B.any()) else []
        assert not self.tasks or "second_pass" in self.method.needs
        self.scores: dict[int, LayerScores] = {}
        self.rows: dict[int, Rows] = {}
        self.lasting: dict[int, LastingLayer] = {}
        self.budgets: dict[int, tuple[Tensor, Tensor]] = {}
        self._finite: list[Tensor] = []

    def observe(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
        """Score one layer, see ``PromptObserver``."""
        home = self.again_B.device
        self.rows[layer] = on_device(rows, home)
        if self.compression.every is not None:
            self.lasting[layer] = LastingLayer(scale, self.rows[layer].regions_BM)
        self._finite += [are_finite(each) for each in (query, key, value)]
        view = LayerView(
            layer,
            query,
            key,
            value,
            rows.regions_BM,
            scale,
            self.method.needs,
            self.compression.in_scope(rows.regions_BM),
            position=rows.position,
            next_position=rows.next_position,
            rotate=self.family.rotation,
            output_weight=partial(self.family.output_weight, layer),
            attended_BN=rows.attended_BM,
            reach=self.family.window(layer, rows.position),
            budget=partial(self._in_scope_budget, rows.regions_BM),
        )
        with torch.autocast(query.device.type, enabled=False):  # scores are fp32
            self.scores[layer] = on_device(self.method.score(view), home)

    def saw_numbers(self) -> bool:
        """Whether all that was observed so far is finite; the device is read."""
        return all(bool(finite) for finite in self._finite)

    def observe_task(
        self,
        plan: TaskPlan,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        rows_BS: Tensor,
        position: Tensor | None = None,
    ) -> None:
        """Score what a task is about in one layer again, see ``TaskObserver``; windows need its rows' ``position``."""
        rows, first = self.rows[layer], self.scores[layer]
        about_BM = rows.visible_BM if plan.about_BN is None else take_rows(plan.about_BN, rows.index_BM)
        about_BM = about_BM & rows.visible_BM
        marks = (each.to(query.device) for each in (rows.regions_BM, rows_BS))
        regions_BM, asks_BS = marks
        reach = None
        if self.family.windows[layer] is not None:
            assert position is not None
            reach = self.family.window(layer, torch.cat([rows.position, position], -1).to(query.device))
        view = TaskView(layer, query, key, value, regions_BM, asks_BS, scale, about_BM.to(query.device), reach)
        replaced_B1M = self.again_B[:, None, None] & about_BM[:, None]
        with torch.autocast(query.device.type, enabled=False):
            scores_BhM = self.method.score_task(view).to(replaced_B1M.device)
        first.scores_BhN = torch.where(replaced_B1M, scores_BhM, first.scores_BhN)

    def keep(self, masks: Sequence[Tensor | None] = (), layout: Layout = "contiguous") -> list[Tensor]:
        """Entries that stay of the layers that were seen, each bool [B, h, M] (h = 1: one set for all heads).

        Args:
            masks: per layer the value groups of its rows, bool [B, M, S], None: all of them; what a budget in bytes
                holds. Empty where no layer routes.
            layout: of the groups.

        Raises:
            ValueError: a budget that does not hold what never competes.
        """
        order = sorted(self.scores)
        regions = [self.rows[layer].regions_BM for layer in order]
        competes = [self.compression.in_scope(x) & ~self._last_row(x) for x in regions]
        exact = torch.stack([self._exact(x, choose) for x, choose in zip(regions, competes, strict=True)])
        most = torch.stack([choose.sum(-1) for choose in competes])
        whole = self._whole(exact)
        budget = torch.minimum(whole, most)
        exact, scores = torch.minimum(exact.clamp(min=0), most), [self.scores[layer] for layer in order]

        def choose(most_B: Tensor | None) -> list[Tensor]:
            capped, real = (budget, exact) if most_B is None else (budget.minimum(most_B), exact.minimum(most_B))
            for i, layer in enumerate(order if self.lasting else ()):
                own = self.lasting[layer]
                own.competes_BM, own.budget_B, own.carried = competes[i], capped[i], scores[i].carried
                if self.compression.unit == "tokens":  # of a short prompt, more than it has
                    own.budget_B = whole[i]
            self.budgets.update(zip(order, zip(competes, capped, strict=True), strict=True))
            return self.method.keep(scores, Candidates(regions, competes, capped, real))

        if self.compression.unit != "bytes" or all(mask is None for mask in masks):
            return choose(None)
        cuts, thin = [self.compression.cuts_keys(x) for x in regions], self.compression.key_channels
        bytes_of = partial(
            prompt_bytes,
            masks=masks,
            cuts_LBM=cuts,
            key_channels=thin,
            shape=self.shape,
            layout=layout,
            beside=fill_bytes(self.shape, self.groups),
        )
        allowed = self.compression.keep * len(order) / self.shape.num_layers
        return largest_choice(choose, bytes_of, budget.amax(0), allowed)

    def forget(self) -> None:
        """Let the layers go that were seen: the next one is kept alone."""
        self.scores.clear()
        self.rows.clear()

    def _last_row(self, regions_BM: Tensor) -> Tensor:
        """The last row of each prompt, which the next token is read from, bool [B, M]."""
        return last_marked(regions_BM != Region.PADDING, int(not self.followed))

    def _in_scope_budget(self, regions_BM: Tensor) -> Tensor:
        """Entries in scope that may stay in a layer, a last row that is in scope among them, int64 [B]."""
        here, regions_BM = regions_BM.device, regions_BM.to(self.again_B.device)
        in_scope_BM = self.compression.in_scope(regions_BM)
        competes_BM = in_scope_BM & ~self._last_row(regions_BM)
        most_B = competes_BM.sum(-1)
        whole_B = torch.minimum(self._whole(self._exact(regions_BM, competes_BM)), most_B)
        return (whole_B + in_scope_BM.sum(-1) - most_B).to(here)

    def _whole(self, exact: Tensor) -> Tensor:
        """Budgets in whole entries, int64, 1 at least: the decimal that was written, not its binary neighbours."""
        whole = torch.ceil(exact - 1e-9) if self.compression.round_up else torch.floor(exact + 1e-9)
        return whole.long().clamp(min=1)

    def _exact(self, regions_BM: Tensor, competes_BM: Tensor) -> Tensor:
        """Competing entries that may stay in a layer, fp64 [B]; a last row that is in scope takes one of them."""
        keep = self.compression.keep
        count_B = self.compression.in_scope(regions_BM).sum(-1)
        if self.compression.unit == "bytes":  # which count what always stays themselves
            budget = replace(self.groups, key_channels=self.compression.key_channels)
            cut_BM = self.compression.cuts_keys(regions_BM)
            return entries_for_bytes(keep, self.shape, regions_BM, competes_BM, cut_BM, budget).double()
        share_B = self._promised(count_B)
        if self.arm is not None:
            arm_B = torch.floor(self._promised(self.arm.tokens_B) + 1e-9).clamp(min=1)
            own_B = torch.ceil(arm_B * self.arm.each - 1e-9)
            share_B = torch.where(count_B == self.arm.anchor_B, own_B, share_B)
        return share_B - (count_B - competes_BM.sum(-1))

    def _promised(self, count_B: Tensor) -> Tensor:
        """Return what a budget in entries leaves of so many in scope, before it is rounded, fp64 [B]."""
        if self.compression.unit == "fraction":
            return count_B.double() * self.compression.keep
        return torch.full_like(count_B, int(self.compression.keep)).double()


@dataclass(frozen=True)
class MatchedArm:
    """The routed arm of a matched anchor, whose bytes the anchor keeps under an eviction too.

    Attributes:
        tokens_B: tokens that the arm's reducer leaves of every sample, int64.
        anchor_B: those that the anchor's leaves.
        each: what a token takes in the arm, of a whole one.
    """

    tokens_B: Tensor
    anchor_B: Tensor
    each: float


def matched_arm(reducer: Reducer, prompts: Batch) -> MatchedArm | None:
    """Return the arm that a reducer is matched with; None of one that is no anchor, or cuts at several layers."""
    if reducer.matches is None or reducer.staged:
        return None
    arm, regions_BN = replace(reducer, keep_ratio=reducer.matches, round_up=False, matches=None), prompts.regions_BN
    tokens = in_compressed_region(regions_BN).sum(-1).tolist()
    counts = [[each.kept_tokens(count) if count else 0 for count in tokens] for each in (arm, reducer)]
    arm_B, anchor_B = torch.tensor(counts, device=regions_BN.device)
    return MatchedArm(arm_B, anchor_B, float(reducer.arm_bytes))
