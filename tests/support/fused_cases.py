"""Drawn layers for the fused kernels, on any device, and how far what these give is from the reference.

Scratch and the tail's room are full of NaN, so that whatever is read without having been written shows.

Legend: B batch, H query heads, h key-value heads, N rows, q new tokens, T places of the tail's room, d head width, S
groups.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from subtoken_train.cache import pack
from subtoken_train.cache.pack import Packing, pack_layer
from subtoken_train.engine.prompt_pass import layer_plan
from subtoken_train.kernels import formats
from subtoken_train.kernels.formats import FORMATS, KVDtype
from subtoken_train.kernels.reference import reference_attention
from subtoken_train.kernels.row_table import FusedState, Workspace
from subtoken_train.kernels.storage import Block, CacheWindow, Fill, Tail
from subtoken_train.types import CutKeys

LEVELS: dict[str, list] = {
    "heads": [1, 2, 3],
    "group": [1, 1, 2, 4, 7, 8],
    "width": [8, 16, 20, 24],
    "pieces": ["none", "few", "many", "halves"],
    "layout": ["contiguous", "per_head"],
    "share": [0.0, 0.25, 0.5, 1.0],
    "sets": ["shared", "own"],
    "keeps": ["all", "one", "some", "few", "none"],
    "entries": [1, 2, 15, 16, 17, 31, 33, 50],
    "form": ["model", "model", "int8", "int4", "kivi4", "kivi2"],
    "dtype": ["float32", "float32", "float16"],
    "new": [1, 1, 1, 2, 5, 16, 19],
    "earlier": [0, 3, 20],
    "padded": [False, False, True],
    "window": [None, None, 12],
    "cut": [False, False, True],
    "written": [False, True],
    "places": [False, True],
    "fill": ["none", "mean", "learned"],
}
"""What is drawn of each."""
BOUNDS = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class FusedCell:
    """One of each of ``LEVELS``; ``pieces`` says how a head is cut: not at all, in two, four, or two channels each."""

    heads: int
    group: int
    width: int
    pieces: str
    layout: str
    share: float
    sets: str
    keeps: str
    entries: int
    form: KVDtype
    dtype: str
    new: int
    earlier: int
    padded: bool
    window: int | None
    cut: bool
    written: bool
    places: bool
    fill: str

    @classmethod
    def drawn(cls, seed: int, **given: object) -> FusedCell:
        """A cell, some of whose levels are given."""
        chooser = random.Random(seed)
        drawn = {each.name: chooser.choice(LEVELS[each.name]) for each in fields(cls)} | given
        if drawn["keeps"] == "none" and drawn["sets"] == "shared":
            drawn["sets"] = "own"  # heads without entries
        if FORMATS[drawn["form"]].run > 1 and "entries" not in given:
            drawn["entries"] *= 3  # for runs
        cell = cls(**drawn)
        widths = cell.width // (cell.per_head or 1), cell.width // (2 if cell.cut else 1)
        fills = all(width % FORMATS[cell.form].per_code == 0 for width in widths)
        return cell if fills else replace(cell, form="int8")  # of less than a byte there are no codes

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
        plan.cut_keys = CutKeys(torch.rand(plan.entries_BN.shape, generator=generator) < 0.7, chosen)
    positions = torch.arange(cell.entries).expand(batch, -1) * 2 if cell.window else None
    dtype = getattr(torch, cell.dtype)
    plan = replace(plan, **{k: v.to(device) for k, v in vars(plan).items() if isinstance(v, Tensor)})
    if plan.cut_keys is not None:
        plan.cut_keys = CutKeys(plan.cut_keys.entries_BN.to(device), plan.cut_keys.channels_Bhd.to(device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "MAX_INDEX", 1e9 if cell.places else 0.0)
        patch.setattr(formats, "LATEST", 1)  # or short layers would have no run
        patch.setenv("SUBTOKEN_KERNEL", "cpu")  # which does not ask for bits
        packing = Packing(cell.layout, FORMATS[cell.form])
        states = (x.to(device, dtype) for x in (key, value))
        fill = fill_of(cell, seed, device, batch)
        of_rows = None if fill is None else fill.vectors_Bhd.to(dtype).flatten(1)
        places = None if positions is None else positions.to(device)
        return pack_layer(*states, plan, packing, places, fill_BV=of_rows)


def fill_of(cell: FusedCell, seed: int, device: str, batch: int = 2) -> Fill | None:
    """What pieces that are not stored read as: of each sample, or a weight in fp32 of them all."""
    if cell.fill == "none":
        return None
    samples = batch if cell.fill == "mean" else 1
    vectors = torch.randn(samples, cell.heads, cell.width, generator=torch.Generator().manual_seed(seed + 2))
    vectors = vectors.to(device, getattr(torch, cell.dtype) if cell.fill == "mean" else torch.float32)
    return Fill(vectors.expand(batch, -1, -1), cell.fill == "mean")


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
    """Scratch that holds NaN before every launch."""

    def take(self, size: int, device: torch.device) -> Tensor:
        return super().take(size, device).fill_(float("nan"))
