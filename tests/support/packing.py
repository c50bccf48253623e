"""Dense and drawn layers, what of them is packed, and what attention on the packed layer must give.

Legend: B batch, H query heads, h key-value heads, N rows, q new tokens, T places of the tail's room, d head width, S
groups.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from subtoken_train.cache.pack import Packing, pack_layer
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.prompt_pass import layer_plan
from subtoken_train.functional.gather import on_device
from subtoken_train.kernels import formats
from subtoken_train.kernels.formats import FORMATS, MODEL, Kivi, Symmetric, TurboQuant
from subtoken_train.kernels.reference import reference_attention
from subtoken_train.kernels.row_table import FusedState, Workspace
from subtoken_train.kernels.storage import Block, CacheWindow, Fill, Tail
from subtoken_train.types import CutKeys

FORMAT_OF = {0: MODEL} | {own.bits: own for own in FORMATS.values() if type(own) is Symmetric}
"""Formats of keys as they are, by their bits."""
SETS = ("all", "shared", "own")
DRAWN = {
    "seed": st.integers(0, 999),
    "sets": st.sampled_from(SETS),
    "layout": st.sampled_from(["contiguous", "per_head"]),
    "share": st.sampled_from([0.0, 0.3, 1.0]),
}
"""Of ``dense``, what most tests draw."""


@pytest.fixture(scope="module", autouse=True)
def short_runs() -> Iterator[None]:
    """KIVI's runs of 4 entries and 3 whole ones, TurboQuant's whole layers 1 and 1, as tests are small; import it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Kivi, "run", 4)
        patch.setattr(formats, "LATEST", 3)
        patch.setattr(TurboQuant, "left", 1)
        yield


@dataclass
class Dense:
    """Keys and values [B, h, N, d], kept entries [B, h or 1, N], and which channels of an entry exist [B, h, N, d]."""

    key: Tensor
    value: Tensor
    keep: Tensor
    groups: Tensor | None
    channels: Tensor
    packing: Packing
    fill: Fill | None = None

    @property
    def read(self) -> Tensor:
        """Values as attention reads them: what is missing of a routed entry is the fill, or 0."""
        if self.fill is None:
            return self.value * self.channels
        return torch.where(self.channels, self.value, self.fill.vectors_Bhd.to(self.value.dtype)[:, :, None])

    def layer(self) -> PackedLayer:
        layer = PackedLayer()
        fill_BV = None if self.fill is None else self.fill.vectors_Bhd.to(self.value.dtype).flatten(1)
        blocks = pack_layer(self.key, self.read, layer_plan(self.keep, self.groups), self.packing, fill_BV=fill_BV)
        layer.store_prompt(blocks, self.key.shape[2], self.key, self.fill)
        return layer


def numbers(stored: Any, *name: str | int) -> dict[tuple, Any]:
    """Every tensor and number of some blocks, by where it stands."""
    if is_dataclass(stored):
        stored = {field.name: getattr(stored, field.name) for field in fields(stored) if field.compare}
    elif isinstance(stored, list):
        stored = dict(enumerate(stored))
    if not isinstance(stored, dict):
        return {name: stored}
    return {own: x for key, part in stored.items() for own, x in numbers(part, *name, key).items()}


def channel_mask(groups_BNS: Tensor, kv_heads: int, width: int, layout: str) -> Tensor:
    """Channel (head, c) of an entry exists iff its group is kept, bool [B, h, N, d]; groups are counted."""
    channel, split = torch.arange(kv_heads * width), width if layout == "per_head" else kv_heads * width
    group = channel % split * groups_BNS.shape[-1] // split
    return groups_BNS[..., group].unflatten(-1, (kv_heads, width)).transpose(1, 2)


def dense(
    seed: int = 0,
    batch: int = 3,
    kv_heads: int = 2,
    length: int = 21,
    width: int = 8,
    num_groups: int | None = 4,
    share: float = 0.5,
    sets: str = "shared",
    layout: str = "contiguous",
    bits: int = 0,
    dtype: torch.dtype = torch.float32,
    fill: str = "none",
) -> Dense:
    """A random layer: ``share`` of the groups kept, a third of the entries whole; samples (and heads) of all sizes."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(batch, kv_heads, length, width, generator=generator).to(dtype) for _ in range(2))
    heads = kv_heads if sets == "own" else 1
    if sets == "all":
        keep = torch.ones(batch, 1, length, dtype=torch.bool)
    else:
        limit = torch.rand(batch, heads, 1, generator=generator)
        keep = torch.rand(batch, heads, length, generator=generator) < limit
        keep[..., -1] = True  # every row keeps something
    groups, channels = None, torch.ones(batch, kv_heads, length, width, dtype=torch.bool)
    if num_groups is not None:
        groups = torch.rand(batch, length, num_groups, generator=generator) < share
        groups |= torch.rand(batch, length, 1, generator=generator) < (0.3 if 0 < share < 1 else 0)
        channels = channel_mask(groups, kv_heads, width, layout)
    return Dense(key, value, keep, groups, channels, Packing(layout, FORMAT_OF[bits]), drawn_fill(seed, fill, key))


def drawn_fill(seed: int, kind: str, like_BhNd: Tensor) -> Fill | None:
    """``mean``: of each sample, in its dtype; ``learned``: one of all samples, in fp32; ``none``."""
    if kind == "none":
        return None
    batch, heads, _, width = like_BhNd.shape
    vectors = torch.randn(batch if kind == "mean" else 1, heads, width, generator=torch.Generator().manual_seed(seed))
    return Fill(vectors.to(like_BhNd.dtype) if kind == "mean" else vectors.expand(batch, -1, -1), kind == "mean")


def masked_attention(
    state: Dense, query: Tensor, tail_key: Tensor, tail_value: Tensor, key: Tensor | None = None, value=None
) -> Tensor:
    """Attend in fp32, [B, H, q, d], over kept entries and a causal tail, filled; ``key``, ``value``: rounded ones."""
    key = state.key if key is None else key
    value = state.read if value is None else value
    shared, new, tail = query.shape[1] // key.shape[1], query.shape[2], tail_key.shape[2]
    keys = torch.cat([key, tail_key], 2).float().repeat_interleave(shared, 1)
    values = torch.cat([value, tail_value], 2).float().repeat_interleave(shared, 1)
    seen = state.keep.expand(-1, key.shape[1], -1).repeat_interleave(shared, 1)[:, :, None].expand(-1, -1, new, -1)
    causal = torch.ones(new, tail).tril(tail - new).bool().expand(*seen.shape[:2], -1, -1)
    scores = query.float() @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~torch.cat([seen, causal], -1), -torch.inf).softmax(-1) @ values


def states(seed: int, batch: int, heads: int, count: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, heads, count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


LEVELS: dict[str, list] = {
    "heads": [1, 2, 3], "group": [1, 1, 2, 4, 7, 8], "width": [8, 16, 20, 24],
    "pieces": ["none", "few", "many", "halves"], "layout": ["contiguous", "per_head"], "share": [0.0, 0.25, 0.5, 1.0],
    "sets": ["shared", "own"], "keeps": ["all", "one", "some", "few", "none"],
    "entries": [1, 2, 15, 16, 17, 31, 33, 50], "form": ["model", "model", "int8", "int4", "kivi4", "kivi2"],
    "dtype": ["float32", "float32", "float16"], "new": [1, 1, 1, 2, 5, 16, 19], "earlier": [0, 3, 20],
    "padded": [False, False, True], "window": [None, None, 12], "cut": [False, False, True], "written": [False, True],
    "fill": ["none", "mean", "learned"], "fed": [True],
}  # fmt: skip
"""What is drawn of each."""
BOUNDS = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


class FusedCell(SimpleNamespace):
    """One of each of ``LEVELS``; ``pieces`` says how a head is cut: not at all, in two, four, or two channels each."""

    @classmethod
    def drawn(cls, seed: int, **given: object) -> "FusedCell":
        """A cell, some of whose levels are given."""
        chooser = random.Random(seed)
        drawn = {name: chooser.choice(levels) for name, levels in LEVELS.items()} | given
        if drawn["keeps"] == "none" and drawn["sets"] == "shared":
            drawn["sets"] = "own"  # heads without entries
        if FORMATS[drawn["form"]].run > 1 and "entries" not in given:
            drawn["entries"] *= 3  # for runs
        cell = cls(**drawn)
        widths = cell.width // (cell.per_head or 1), cell.width // (2 if cell.cut else 1)
        fills = all(width % FORMATS[cell.form].per_code == 0 for width in widths)
        return cell if fills else cls(**vars(cell) | {"form": "int8"})  # of less than a byte there are no codes

    @property
    def per_head(self) -> int:
        """Pieces of a head; 0: it is not cut."""
        return {"none": 0, "halves": 2, "few": 4, "many": self.width // 2}[self.pieces]

    @property
    def groups(self) -> int | None:
        return self.per_head * (1 if self.layout == "per_head" else self.heads) or None


def layer_of(cell: FusedCell, seed: int, device: str, batch: int = 2) -> list[Block]:
    generator = torch.Generator().manual_seed(seed)
    shape = batch, cell.heads, cell.entries, cell.width
    key, value = (torch.randn(shape, generator=generator) for _ in range(2))
    heads, rows = (cell.heads if cell.sets == "own" else 1), torch.rand(batch, 1, 1, generator=generator)
    limit = {"all": 1.1, "some": rows, "few": rows / 4}.get(cell.keeps, -1.0)
    keep = torch.rand(batch, heads, cell.entries, generator=generator) < limit
    if cell.keeps != "none":
        keep[..., -1] = True
    groups = None
    if cell.groups:
        groups = torch.rand(batch, cell.entries, cell.groups, generator=generator) < cell.share
        groups |= torch.rand(batch, cell.entries, 1, generator=generator) < 0.2  # some are whole
    plan = layer_plan(keep, groups)
    if cell.cut and cell.width % 4 == 0:
        chosen = torch.rand(batch, cell.heads, cell.width, generator=generator).argsort(-1) < cell.width // 2
        plan.cut_keys = CutKeys(torch.rand(plan.entries_BN.shape, generator=generator) < 0.7, cell.width // 2, chosen)
    positions = torch.arange(cell.entries).expand(batch, -1) * 2 if cell.window else None
    dtype = getattr(torch, cell.dtype)
    plan = on_device(plan, torch.device(device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "LATEST", 1)  # or short layers would have no run
        packing = Packing(cell.layout, form := FORMATS[cell.form])
        if form.rotates and cell.fed:
            errors = torch.randn(batch, cell.heads, cell.width, cell.width, generator=generator) / cell.width
            packing = replace(packing, feedback_Bhdd=(errors.tril(-1) + torch.eye(cell.width)).to(device))
        states = (x.to(device, dtype) for x in (key, value))
        fill = fill_of(cell, seed, device, batch)
        of_rows = None if fill is None else fill.vectors_Bhd.to(dtype).flatten(1)
        return pack_layer(*states, plan, packing, None if positions is None else positions.to(device), fill_BV=of_rows)


def fill_of(cell: FusedCell, seed: int, device: str, batch: int = 2) -> Fill | None:
    """What pieces that are not stored read as: of each sample, or a weight in fp32 of them all."""
    like_Bh1d = torch.empty(batch, cell.heads, 1, cell.width, dtype=getattr(torch, cell.dtype))
    return on_device(drawn_fill(seed + 2, cell.fill, like_Bh1d), torch.device(device))


def deviation(cell: FusedCell, seed: int, device: str = "cpu") -> float:
    """Largest difference between the fused kernels and the reference in one step, and nothing but numbers."""
    from subtoken_train.kernels.triton_attention import fused_decoding

    blocks, batch, fill = layer_of(cell, seed, device), 2, fill_of(cell, seed, device)
    generator = torch.Generator().manual_seed(seed + 1)
    length, dtype = cell.earlier + cell.new, getattr(torch, cell.dtype)
    shape = batch, cell.heads, length, cell.width
    keys, values = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    rooms = [torch.nn.functional.pad(x, (0, 0, 0, 7), value=float("nan")) for x in (keys, values)]
    query = torch.randn(batch, cell.new, cell.heads * cell.group, cell.width, generator=generator)
    query = query.to(device, dtype).transpose(1, 2)  # as models make them
    start = torch.tensor([0, cell.earlier], device=device) if cell.padded else None
    first = torch.tensor([2 * cell.entries, 2 * cell.entries + 3], device=device)
    reach = None if cell.window is None else CacheWindow(cell.window, first if start is None else first - start)
    written = torch.tensor([length], device=device) if cell.written else None
    expected = reference_attention(query, blocks, Tail(keys, values, length, start), 0.3, reach, fill)
    state = FusedState(PoisonedWorkspace())
    table = state.table_of(blocks, batch, cell.heads, cell.width, fill)
    tail = Tail(*rooms, -1 if cell.written else length, start, written)
    got = fused_decoding(query, table, tail, 0.3, reach, state.workspace)
    assert got.dtype == dtype
    assert got.shape == expected.shape
    assert torch.isfinite(got).all()
    return float((got.float() - expected.float()).abs().max())


class PoisonedWorkspace(Workspace):
    def take(self, size: int, device: torch.device) -> Tensor:
        return super().take(size, device).fill_(float("nan"))
