"""What a layer's plan says of every row of its storage, and how much of it there is, as numbers on the host.

The numbers are shapes: whoever packs has to read them from the device. They are all that is read, and of many layers
at once, because a plan stands before its keys and values are looked at.

Legend: B batch, h key-value heads, R rows of the storage (samples where heads share entries, else heads of samples),
M entries of the plan, N rows of the prompt, S value groups or bits, P pieces of an entry, K kinds, c heads of a row, k
channels of a cut key, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.types import CutKeys, LayerPlan, Layout


@dataclass(frozen=True)
class Kind:
    """Entries of a row that are stored alike.

    Attributes:
        routed: in pieces, else with the whole value.
        cut: with a part of the key.
        marks_RM: which they are, bool.
    """

    routed: bool
    cut: bool
    marks_RM: Tensor


@dataclass(frozen=True)
class PlanMarks:
    """A layer's plan, by the rows of its storage.

    Attributes:
        rows_RM: the row of the prompt that each entry is, int64.
        kinds: routed ones first, of these the cut ones; without those that a plan has none of.
        flags_RSM: what each entry stores of its value, bool, by S bits; None where no value is cut.
        piece_bit: which of the bits rules each piece, int64 [P]; None alike.
        bit_of: the same on the host; empty alike.
        cut: which keys are cut; None: none.
    """

    rows_RM: Tensor
    kinds: list[Kind]
    flags_RSM: Tensor | None
    piece_bit: Tensor | None
    bit_of: list[int]
    cut: CutKeys | None

    def numbers(self) -> Tensor:
        """Of every row the entries of each kind, of routed ones the set bits, then a cut key's channels, [R, n]."""
        counts = [torch.stack([kind.marks_RM.sum(-1) for kind in self.kinds], -1)]
        if self.flags_RSM is not None:
            counts += [(self.flags_RSM & kind.marks_RM[:, None]).sum(-1) for kind in self.kinds if kind.routed]
        if self.cut is not None:
            counts.append(self.cut.channels_Bhd[0, 0].sum().expand(len(self.rows_RM), 1))
        return torch.cat(counts, -1)


@dataclass(frozen=True)
class RowCounts:
    """``PlanMarks.numbers`` on the host.

    Attributes:
        kinds: of every row the entries of each kind.
        bits: per routed kind of every row the entries that store each bit.
        channels: that a cut key keeps; 0 where none is cut.
    """

    kinds: list[tuple[int, ...]]
    bits: list[list[list[int]]]
    channels: int


def plan_marks(plan: LayerPlan, kv_heads: int, width: int, layout: Layout) -> PlanMarks:
    """A plan's entries by how they are stored.

    Args:
        plan: of one layer.
        kv_heads: h.
        width: d.
        layout: of the value groups.
    """
    valid_BM, groups_BMS, shared = plan.entries_BN >= 0, plan.group_mask_BNS, plan.heads_BNh is None
    rows_BM = plan.entries_BN.clamp(min=0) if plan.rows_BN is None else plan.rows_BN
    times = 1 if shared else kv_heads

    def each_head(marks_BM: Tensor) -> Tensor:
        return marks_BM if shared else marks_BM.repeat_interleave(times, 0)

    keep_RM = valid_BM
    if plan.heads_BNh is not None:
        keep_RM = (plan.heads_BNh & valid_BM[..., None]).transpose(1, 2).flatten(0, 1)
    kinds = [Kind(False, False, keep_RM)]
    flags_RSM = piece_bit = None
    bit_of: list[int] = []
    if groups_BMS is not None:
        flags_RSM, piece_bit = _bits(groups_BMS, kv_heads, width, layout, shared)
        bit_of = _bit_of(groups_BMS.shape[-1], kv_heads, width, layout)
        bit_of = bit_of if shared else list(range(len(bit_of) // kv_heads))
        whole_RM = each_head(groups_BMS.all(-1))
        kinds = [Kind(True, False, keep_RM & ~whole_RM), Kind(False, False, keep_RM & whole_RM)]
    if plan.cut_keys is not None:
        cut_RM = each_head(plan.cut_keys.entries_BN)
        kinds = [Kind(kind.routed, cut, kind.marks_RM & (cut_RM == cut)) for kind in kinds for cut in (True, False)]
    return PlanMarks(each_head(rows_BM), kinds, flags_RSM, piece_bit, bit_of, plan.cut_keys)


def read_counts(layers: Sequence[PlanMarks]) -> list[RowCounts]:
    """What layers store, read from the device at once."""
    if not layers:
        return []
    numbers = [layer.numbers() for layer in layers]
    flat = iter(torch.cat([each.flatten().to(numbers[0].device) for each in numbers]).tolist())
    return [
        _counts(layer, [[next(flat) for _ in range(each.shape[1])] for _ in range(each.shape[0])])
        for layer, each in zip(layers, numbers, strict=True)
    ]


def _counts(marks: PlanMarks, rows: list[list[int]]) -> RowCounts:
    num_kinds, routed = len(marks.kinds), sum(kind.routed for kind in marks.kinds)
    bits = 0 if marks.flags_RSM is None else marks.flags_RSM.shape[1]
    starts = [num_kinds + bits * i for i in range(routed)]
    return RowCounts(
        [tuple(row[:num_kinds]) for row in rows],
        [[row[start : start + bits] for row in rows] for start in starts],
        0 if marks.cut is None else rows[0][-1],
    )


def _bit_of(num_groups: int, kv_heads: int, width: int, layout: Layout) -> list[int]:
    """Which group rules each piece of an entry's whole value."""
    if layout == "per_head":
        return list(range(num_groups)) * kv_heads
    group_width = kv_heads * width // num_groups
    return [start // group_width for start in range(0, kv_heads * width, math.gcd(group_width, width))]


def _bits(groups_BMS: Tensor, kv_heads: int, width: int, layout: Layout, shared: bool) -> tuple[Tensor, Tensor]:
    """What says which pieces of an entry are stored: flags bool [R, S, M], and each piece's flag, int64 [P].

    Where heads share their entries the flags are the groups themselves; else every head has the flags of its own
    pieces.
    """
    num_groups, device = groups_BMS.shape[-1], groups_BMS.device
    if layout == "per_head":
        piece_bit = torch.arange(num_groups, device=device).repeat(kv_heads)
    else:
        group_width = kv_heads * width // num_groups
        starts = torch.arange(0, kv_heads * width, math.gcd(group_width, width), device=device)
        piece_bit = starts.div(group_width, rounding_mode="floor")
    flags_BSM = groups_BMS.transpose(1, 2)
    if shared:
        return flags_BSM, piece_bit
    flags_BPM = flags_BSM.index_select(1, piece_bit)
    pieces = len(piece_bit) // kv_heads
    by_head = flags_BPM.reshape(len(flags_BPM) * kv_heads, pieces, flags_BPM.shape[-1])
    return by_head, torch.arange(pieces, device=device)
