"""What the truth takes from a prompt, written out: positions, fills, cuts, and what stored entries are read back as.

Legend: B batch, M rows of a stretch of layers, N rows of a sample, h key-value heads, H query heads, d head width, D
model width.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from subtoken_train.cache.key_basis import BalancedBasis
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.prompt_pass import PromptPass
from subtoken_train.evictions.queries import QuestSteps
from subtoken_train.families.family import Family
from subtoken_train.inference.compression import Compression
from subtoken_train.kernels import formats
from subtoken_train.kernels.formats import LEVELS, NVFP4, SHARES, AboveZero, Format, Fp8, Kivi, TurboQuant
from subtoken_train.reducers.base import RankingReducer
from subtoken_train.reducers.staged import Cut, DecoderReducer
from subtoken_train.types import Batch, Region
from tests.support.helpers import only_sample


def prompt_positions(family: Family, prompts: Batch, sample: int) -> Tensor:
    """Count positions, [n] or [3, n], of real tokens: a picture's grid, a video in time (Qwen3-VL: as pictures)."""
    ids = prompts.input_ids_BN[sample, prompts.regions_BN[sample] != Region.PADDING].tolist()
    if family.tower_positions != "mrope":
        return torch.arange(len(ids))
    first = int(prompts.images_per_sample_B[:sample].sum())
    grids = [] if prompts.image_grid_I3 is None else prompts.image_grid_I3[first:].tolist()
    seconds = [0.5] * len(grids) if prompts.seconds_I is None else prompts.seconds_I[first:].tolist()
    shown = [(*grid, int(2 * second)) for grid, second in zip(grids, seconds, strict=True)]
    if family.name.startswith(("qwen3_vl", "glm4v")):
        shown = [(1, high, wide, 1) for layers, high, wide, _ in shown for _ in range(layers)]
    visual = (family.model.config.image_token_id, family.model.config.video_token_id)
    placed: list[tuple[int, int, int]] = []
    start = 0
    while len(placed) < len(ids):
        if ids[len(placed)] not in visual:
            placed.append((start, start, start))
            start += 1
            continue
        layers, high, wide, step = shown.pop(0)
        cells = [(row, column) for row in range(high // 2) for column in range(wide // 2)]
        placed += [(start + step * t, start + row, start + column) for t in range(layers) for row, column in cells]
        start += max(high, wide) // 2
    return torch.tensor(placed).T


def plain_window(config, layer: int) -> int | None:
    """Positions that a row of the layer sees, its own included; None: all before it."""
    kinds = getattr(config, "layer_types", None)
    slides = not kinds or config.model_type == "mistral" or kinds[layer] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


SIDE_BY_SIDE = ("cohere", "glm4")
"""Models whose channels turn in pairs 0 and 1, 2 and 3, ...; in others the first half goes with the second."""


def moved_keys(key: Tensor, entries_hN: Tensor, position_N: Tensor, frequencies: Tensor, model_type: str) -> Tensor:
    """Keys [1, h, n, d] whose kept entries are turned on from their own places to 0, 1, 2, ..., head by head."""
    moved, pairs = key.clone(), len(frequencies)
    one, other = slice(0, pairs), slice(pairs, 2 * pairs)
    if model_type in SIDE_BY_SIDE:
        one, other = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    for head, kept_N in enumerate(entries_hN):
        own = kept_N.nonzero()[:, 0]
        angle = (torch.arange(len(own)) - position_N[own])[:, None] * frequencies
        first, second = key[0, head, own, one], key[0, head, own, other]
        moved[0, head, own, one] = first * angle.cos() - second * angle.sin()
        moved[0, head, own, other] = second * angle.cos() + first * angle.sin()
    return moved


@dataclass
class PlainFill:
    """The mean of the values of ``rows_N``; zero where it is None."""

    rows_N: Tensor | None = None

    def under(self, value_1hMd: Tensor, factor_hNd: Tensor) -> Tensor:
        """What the first rows' values leave to it, [1, h, N, d]: all where their factor is 0, nothing where it is 1."""
        if self.rows_N is None:
            return torch.zeros_like(value_1hMd[:, :, : factor_hNd.shape[1]])
        fill_hd = value_1hMd[0][:, self.rows_N.nonzero()[:, 0]].float().mean(1)
        return (fill_hd.to(value_1hMd.dtype)[:, None] * (1 - factor_hNd.to(value_1hMd.dtype)))[None]


def plain_fill(backbone: CompressedBackbone, layer: int, routed_N: Tensor, mask: Tensor | None) -> PlainFill:
    """Of a layer that routes these rows, or (no mask) none."""
    mean = mask is not None and backbone.bank.config.fill == "mean" and bool(routed_N.any())
    return PlainFill(routed_N if mean else None)


@torch.no_grad()
def deep_rows(
    family: Family, prompts: Batch, sample: int, places_N: Tensor, joins_N: Tensor | None = None
) -> tuple[Tensor, list[Tensor]] | None:
    """Find a prompt's visual rows, and the first layers' features of each, a mean of all that joined it."""
    if not family.name.startswith("qwen3_vl") or not int(prompts.images_per_sample_B[sample]):
        return None
    alone, config = only_sample(prompts, sample), family.model.config
    made = family.model.model.visual(alone.pixel_values.to(family.model.dtype), grid_thw=alone.image_grid_I3)
    ids = alone.input_ids_BN[0]
    visual = (ids == config.image_token_id) | (ids == config.video_token_id)
    number, shown = visual.cumsum(0) - 1, visual[places_N]
    who = [place[None] if joins_N is None else (joins_N == place).nonzero()[:, 0] for place in places_N[shown]]
    return shown, [torch.stack([deep[number[joined]].mean(0) for joined in who]) for deep in made.deepstack_features]


def deep_inputs(deep: tuple[Tensor, list[Tensor]] | None, hidden_1ND: Tensor) -> dict[str, object]:
    """Of Qwen3-VL's decoder: no token after the rows is visual."""
    if deep is None:
        return {}
    shown, features = deep
    visual_1N = torch.zeros(hidden_1ND.shape[:2], dtype=torch.bool)
    visual_1N[0, : len(shown)] = shown
    return {"visual_pos_masks": visual_1N, "deepstack_visual_embeds": features}


@contextmanager
def noting_cuts(backbone: CompressedBackbone, made: dict[int, Cut]) -> Iterator[None]:
    """Note the cuts of the passes inside the block by their layers, 0 at the embeddings; later ones write over it."""
    method, name = type(backbone.reducer), "select" if backbone.reducer.stage == "embeds" else "cut"
    if not issubclass(method, (DecoderReducer, RankingReducer)):
        yield
        return
    decides = getattr(method, name)

    def noted(self, view):
        decided = decides(self, view)
        made[view.layer if name == "cut" else 0] = decided if name == "cut" else Cut(*decided)
        return decided

    own = name in vars(method)
    setattr(method, name, noted)
    try:
        yield
    finally:
        if own:
            setattr(method, name, decides)
        else:
            delattr(method, name)


def joined_places(made: dict[int, Cut], sample: int, start: int) -> Tensor | None:
    """The place of the prompt that each place joined before layer 0, from its first token on; None where none did."""
    joins_BN = made[0].joins_BM if 0 in made else None
    return None if joins_BN is None else joins_BN[sample, start:] - start


def joined_targets(
    result: PromptPass, made: dict[int, Cut], sample: int, layer: int, origin_N: Tensor
) -> Tensor | None:
    """The row [N] that each row joins before ``layer``; None where none does."""
    before = [rows for _, stop, rows in result.spans if stop == layer]
    if layer not in made or made[layer].joins_BM is None or not before:
        return None
    place = {int(row): i for i, row in enumerate(origin_N)}
    index_M, real_M = before[0].index_BM[sample], before[0].visible_BM[sample]
    targets_N = torch.arange(len(origin_N))
    for row in real_M.nonzero()[:, 0].tolist():
        targets_N[place[int(index_M[row])]] = place[int(index_M[made[layer].joins_BM[sample, row]])]
    return targets_N


def counted_anew(made: dict[int, Cut], layer: int, seen_N: Tensor, position: Tensor) -> Tensor | None:
    """Positions [N] of what ``layer`` sees, the last row where it stood in ``position``; None where all stay there."""
    if position.dim() > 1 or not any(cut.policy == "renumber" for start, cut in made.items() if start <= layer):
        return None
    return position[len(seen_N) - 1] - int(seen_N.sum()) + seen_N.long().cumsum(0)


@contextmanager
def cut_layers(family: Any, made: list[tuple[Tensor | None, Tensor | None]], position: Tensor) -> Iterator[None]:
    """Join and move a sample's rows in a decoder: ``made`` has each layer's targets [N] of rows, and new places."""

    def entering(targets: Tensor | None, own: Tensor | None) -> Callable[..., tuple[Any, Any]]:
        def hook(_, args, options):
            hidden = args[0]
            if targets is not None:
                states, rows = hidden[0, : len(targets)], targets.unique()
                hidden = hidden.clone()
                hidden[0, rows] = torch.stack([states[targets == row].float().mean(0) for row in rows]).to(hidden.dtype)
            if own is not None:
                places = torch.cat([own, position[len(own) :]])
                options["position_embeddings"] = family.decoder.rotary_emb(hidden, places[None])
            return (hidden, *args[1:]), options

        return hook

    layers = zip(family.decoder.layers, made, strict=True)
    handles = [layer.register_forward_pre_hook(entering(*each), with_kwargs=True) for layer, each in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


LEAST = 2.0**-24
E4M3 = [part / 512 for part in range(8)] + [2.0**e * (1 + part / 8) for e in range(-6, 9) for part in range(8)][:-1]
E2M1 = [0, 0.5] + [2.0**e * (1 + part / 2) for e in range(3) for part in range(2)]
"""Numbers from 0 up that a byte and half a byte hold (OCP's formats; the byte's last one stands for no number)."""

EDGE = 1e-5
"""Nearer to the edge of two codes, as a share of a vector's largest number, or to that of two scales of fp16, as a
share of the scale, the last bits of fp32 decide; so with two shares' losses, as a share of the smaller."""


class Rounding:
    """Rounds vectors."""

    def __init__(self) -> None:
        self.edge = math.inf  # how near any number was to the edge of two, of codes or of fp16's scales
        self.ties = 0  # numbers nearer than ``EDGE``
        self.told = frozenset[int]()  # those of the ties that go to the other side

    def _over(self, apart: Tensor) -> Tensor:
        """Whether numbers that are ``apart`` from the edge of two go to the other side."""
        self.edge = min(self.edge, float(apart.min()))
        over = apart < EDGE
        for place in over.nonzero()[:, 0].tolist():
            over[place] = self.ties in self.told
            self.ties += 1
        return over

    def by_vector(self, vector: Tensor, bits: int, share: float = 1.0) -> Tensor:
        """One vector as symmetric whole numbers of one fp16 scale."""
        top, largest = 2 ** (bits - 1) - 1, vector.abs().max()
        scale = self._half((share * largest / top).clamp(min=LEAST))
        return self._codes(vector / scale, scale, largest).clamp(-top, top) * scale

    def by_float(self, vector: Tensor, bits: int) -> Tensor:
        """One vector as floats of a byte, or of half a byte with one of a byte for 16, of one fp16 scale."""
        scale = self._half((vector.abs().max() / (448 if bits == 8 else 6 * 448)).clamp(min=LEAST))
        if bits == 8:
            return self.nearest(vector / scale, E4M3) * scale
        blocks = (vector / scale).split(16)
        pairs = zip(blocks, [self.nearest(block.abs().max() / 6, E4M3) for block in blocks], strict=True)
        return torch.cat([self.nearest(block / own.clamp(min=LEAST), E2M1) * own for block, own in pairs]) * scale

    def by_block(self, numbers: Tensor, bits: int) -> Tensor:
        """Some numbers as whole ones above their least, of one fp16 scale."""
        top, zero = 2**bits - 1, self._half(numbers.min())
        extent = numbers.max() - zero
        scale = self._half((extent / top).clamp(min=LEAST))
        return self._codes((numbers - zero) / scale, scale, extent).clamp(0, top) * scale + zero

    def by_channel(self, key: Tensor, lower: Tensor, bits: int) -> Tensor:
        """One rotated key, of the share that loses least; every channel makes up for those before it."""
        top, lost, read = 2 ** (bits - 1) - 1, torch.zeros_like(key), torch.zeros_like(key)
        each = torch.stack([(Rounding().by_vector(key, bits, share) - key).square().sum() for share in SHARES])
        (least, other), near = each.topk(2, largest=False)
        share = SHARES[near[int(self._over((other - least)[None] / least.clamp(min=LEAST)))]]
        largest = key.abs().max()
        scale = self._half((share * largest / top).clamp(min=LEAST))
        for channel in range(len(key)):
            owed = (lower[channel, :channel] * lost[:channel]).sum()
            read[channel] = self._codes((key[channel] - owed) / scale, scale, largest).clamp(-top, top) * scale
            lost[channel] = read[channel] - key[channel]
        return read

    def by_level(self, key: Tensor, bits: int) -> Tensor:
        """One key of TurboQuant: its direction's channels, turned, at the nearest levels; as long as it was."""
        if not bool(key.any()):
            return key
        turn, block = torch.ones(1, 1), len(key) & -len(key)
        while len(turn) < block:  # Sylvester's
            turn = torch.cat([torch.cat([turn, turn], 1), torch.cat([turn, -turn], 1)])
        found = self.nearest(key.view(-1, block) @ turn / block**0.5 / key.norm() * len(key) ** 0.5, LEVELS[bits])
        return (found / found.norm() @ turn.T / block**0.5).flatten() * self._half(key.norm())

    def nearest(self, numbers: Tensor, above: Sequence[float]) -> Tensor:
        """The nearest of levels from 0 up and of these below it; of two the one at an even place from 0."""
        levels = torch.tensor(sorted({sign * level for level in above for sign in (-1, 1)}))
        apart = (numbers[..., None] - levels).abs()
        (near, other), place = apart.topk(2, largest=False).values.unbind(-1), apart.argmin(-1)
        over = self._over(((other - near) / 2 / numbers.abs().max().clamp(min=LEAST)).view(-1)).view_as(place)
        place = place + (near == other) * (place - len(levels) // 2) % 2
        return levels[torch.where(over, place + (2 * (numbers > levels[place]) - 1), place).clamp(0, len(levels) - 1)]

    def _codes(self, numbers: Tensor, scale: Tensor, extent: Tensor) -> Tensor:
        apart = (numbers - numbers.floor() - 0.5).abs() * scale / extent.clamp(min=LEAST)
        over = self._over(apart.view(-1)).view_as(numbers)
        return torch.where(over, numbers.floor() + numbers.ceil() - numbers.round(), numbers.round())

    def _half(self, number: Tensor) -> Tensor:
        rounded = number.float().half().float()
        if float(number) != 0:
            step = 2.0 ** max(math.floor(math.log2(abs(float(number)))) - 10, -24)
            apart = abs(abs(float(number - rounded)) - step / 2)
            if self._over(torch.tensor([apart / abs(float(number))])):
                return rounded + (1 if number > rounded else -1) * step
        return rounded


@dataclass
class PlainStorage:
    """How a layer's entries are stored; of a key (key - ``centre_h1d``) ``into_hdd``, read back by ``out_hdd``."""

    form: Format
    cut_N: Tensor
    centre_h1d: Tensor | float = 0.0
    into_hdd: Tensor | None = None
    out_hdd: Tensor | None = None
    feedback_hdd: Tensor | None = None
    rounding: Rounding = field(default_factory=Rounding)

    def read(
        self, key_hNd: Tensor, value_hNd: Tensor, fill_hNd: Tensor, there_hNd: Tensor, entries_hN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read stored keys and values as tokens do; ``fill_hNd`` of dropped groups, ``there_hNd``: what is stored."""
        whole_N, self.rounding.ties = there_hNd.all(-1).all(0), 0
        under_hNd = fill_hNd * ~whole_N[:, None]
        keys, values = key_hNd - self.centre_h1d, value_hNd - under_hNd
        keys = keys if self.into_hdd is None else keys @ self.into_hdd
        for head in range(len(entries_hN)):
            for whole in (False, True):
                for cut in (False, True):
                    rows = (entries_hN[head] & (whole_N == whole) & (self.cut_N == cut)).nonzero()[:, 0].tolist()
                    self._round(keys[head], values[head], there_hNd[head], rows, head)
        keys = keys if self.out_hdd is None else keys @ self.out_hdd
        return keys + self.centre_h1d, values + under_hNd

    def _round(self, keys_Nd: Tensor, values_Nd: Tensor, there_Nd: Tensor, rows: list[int], head: int) -> None:
        bits, runs, rounding = self.form.bits, isinstance(self.form, Kivi), self.rounding
        floats = rounding.by_float if isinstance(self.form, Fp8 | NVFP4) else rounding.by_vector
        by = rounding.by_block if isinstance(self.form, AboveZero) else floats
        if runs:
            rows = rows[: max(len(rows) - formats.LATEST, 0) // self.form.run * self.form.run]
        for start in range(0, len(rows), self.form.run):
            run = rows[start : start + self.form.run]
            for channel in range(keys_Nd.shape[1]) if runs else ():
                keys_Nd[run, channel] = rounding.by_block(keys_Nd[run, channel], bits)
        for row in rows:
            own = there_Nd[row]
            if bool(own.any()):
                values_Nd[row, own] = by(values_Nd[row, own], bits)
            if self.feedback_hdd is not None:
                keys_Nd[row] = rounding.by_channel(keys_Nd[row], self.feedback_hdd[head], bits)
            elif isinstance(self.form, TurboQuant):
                keys_Nd[row] = rounding.by_level(keys_Nd[row], bits)
            elif not runs:
                keys_Nd[row] = by(keys_Nd[row], bits)


def plain_storage(
    form: Format,
    layer: PackedLayer,
    feedback_Bhdd: Tensor | None,
    sample: int,
    cut_N: Tensor,
    turn: tuple[Tensor, Tensor],
) -> PlainStorage:
    """Say how a sample's entries are stored, by the prompt's pass; ``turn``: centre and axes of turned keys."""
    storage = PlainStorage(form, cut_N)
    if isinstance(layer.basis, BalancedBasis):
        size_hd, turn_dd = layer.basis.size_Bh1d[sample, :, 0].float(), layer.basis.turn_dd
        storage.centre_h1d = layer.basis.centre_Bh1d[sample].float()
        storage.into_hdd, storage.out_hdd = turn_dd / size_hd[..., None], turn_dd.T * size_hd[:, None]
        storage.feedback_hdd = feedback_Bhdd[sample]
    elif turn[0] is not None:
        storage.centre_h1d, storage.into_hdd = turn
        storage.out_hdd = turn[1].mT
    return storage


@contextmanager
def noting_feedback() -> Iterator[list[Tensor]]:
    """Note the feedback of rotated keys, layer after layer."""
    noted, feedback = [], BalancedBasis.feedback

    def noting(basis, moment_Bhdd):
        noted.append(feedback(basis, moment_Bhdd))
        return noted[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BalancedBasis, "feedback", noting)
        yield noted


@dataclass
class PageTruth:
    """One layer of one sample."""

    columns: list[int]  # its entries in order
    chosen_of: set[int]  # those that compete
    budget: int  # of these may be read
    size: int
    least: int

    def pages(self) -> tuple[list[list[int]], list[bool], int]:
        """Whole pages, whether each is always read, and how many are."""
        parts = [self.columns[i : i + self.size] for i in range(0, len(self.columns), self.size)]
        left_over = parts.pop() if parts and len(parts[-1]) < self.size else []
        always = [any(column not in self.chosen_of for column in part) for part in parts]
        if not left_over and always:
            always[-1] = True
        forced = [column for part, stays in zip(parts, always, strict=True) if stays for column in part]
        spare = self.budget - len([column for column in [*forced, *left_over] if column in self.chosen_of])
        count = max(sum(always) + max(0, spare) // self.size, self.least - bool(left_over))
        return parts, always, min(count, len(parts))

    def hide_unread(self, allowed_hNN: Tensor, query_HNd: Tensor, key_hNd: Tensor, alone: int) -> None:
        """Hide from every row from ``alone`` on, which came by itself, the pages that each head does not choose."""
        parts, always, count = self.pages()
        group = len(query_HNd) // len(key_hNd)
        for head, keys in enumerate(key_hNd.float()):
            for row in range(alone, allowed_hNN.shape[1]):
                queries, bounds = query_HNd[head * group : (head + 1) * group, row].float(), []
                for part, stays in zip(parts, always, strict=True):
                    bound = torch.maximum(queries * keys[part].amin(0), queries * keys[part].amax(0)).sum() / group
                    bounds.append(float("inf") if stays else float(bound))
                for page in sorted(range(len(parts)), key=lambda page, own=bounds: (-own[page], page))[count:]:
                    allowed_hNN[head, row, parts[page]] = False


def note_pages(saved: list, tap, compression: Compression) -> None:
    """Write into the truth of every sample what the steps read under ``QuestSteps``, with a share as the budget."""
    method, result, followed = compression.eviction, tap.result[-1], tap.batch[-1].followed
    assert isinstance(method, QuestSteps)
    first = result.spans[0][2] if result.spans else result.rows
    for sample, truth in enumerate(saved):
        regions = first.regions_BM[sample, first.visible_BM[sample]].tolist()
        for layer in truth.layers[method.dense_layers :]:
            columns = layer.entries_hN[0].nonzero()[:, 0].tolist()
            inside = [i for i in columns if compression.scope == "all" or regions[i] in (Region.VISUAL, Region.CONTEXT)]
            chosen_of = set(inside) - (set() if followed else {columns[-1]})
            budget = int(len(inside) * compression.keep + 1e-9) - (len(inside) - len(chosen_of))
            budget = min(max(1, budget), len(chosen_of))
            layer.pages = PageTruth(columns, chosen_of, budget, method.page_size, method.least_pages)
