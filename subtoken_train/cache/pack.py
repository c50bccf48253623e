"""Pack one layer's dense keys and values: what a plan keeps, and nothing else.

How much that is are shapes, which are read from the device of many layers at once (``read_counts``).

Legend: B batch, h key-value heads, N rows of the prompt, d head width, S value groups, R rows of a block, c heads of a
row (h where heads share entries, else 1), M entries of the plan or of a block, P pieces of an entry (or pages), w
channels of a piece, K kinds, k channels of a cut key.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from operator import itemgetter

import torch
from torch import Tensor

from subtoken_train.cache.by_sample import select_part
from subtoken_train.functional.gather import each_tensor, on_device, sent, take_entries
from subtoken_train.kernels.choice import choose_kernel
from subtoken_train.kernels.formats import MODEL, Format, Part, Payload
from subtoken_train.kernels.native import stored_keys
from subtoken_train.kernels.row_table import DTYPES, Field, addresses
from subtoken_train.kernels.storage import Block, BlockPart, PageIndex, RoutedValues, pack_bits
from subtoken_train.types import LayerPlan, Layout, grouped


@dataclass(frozen=True)
class Kind:
    """A kind of entries of a row: those that are stored alike."""

    routed: bool
    cut: bool
    marks_RM: Tensor
    form: Format


@dataclass(frozen=True)
class PlanMarks:
    """A layer's plan, sorted by the rows of its storage."""

    rows_RM: Tensor  # the row of the prompt that each entry is, int64
    kinds: list[Kind]  # routed ones first, of these the cut ones, of these full runs; the last: stored whole
    flags_RSM: Tensor | None  # what each entry stores of its value, bool, by S bits; None: no value is cut
    piece_bit: Tensor | None  # which of the bits rules each piece, int32 [P]
    bit_of: list[int]  # the same on the host
    valid_RM: Tensor  # entries that any head of the row's sample keeps, bool
    channels: int  # of a cut key; 0: none is cut

    def numbers(self) -> Tensor:
        """Count each row's entries, its own by kind, and the set bits of routed ones, [R, n]."""
        counted = [torch.stack([self.valid_RM, *(kind.marks_RM for kind in self.kinds)], 1)]
        if self.flags_RSM is not None:
            counted += [self.flags_RSM & kind.marks_RM[:, None] for kind in self.kinds if kind.routed]
        return (counted[0] if len(counted) == 1 else torch.cat(counted, 1)).sum(-1)


@dataclass(frozen=True)
class RowCounts:
    """``PlanMarks.numbers`` on the host: by row the entries of each kind, by routed kind those that store each bit."""

    marks: PlanMarks
    longest: int  # entries that a sample keeps at most
    kinds: list[tuple[int, ...]]
    bits: list[list[list[int]]]


def plan_marks(plan: LayerPlan, kv_heads: int, width: int, layout: Layout, form: Format = MODEL) -> PlanMarks:
    """Sort a plan's entries by how they are stored."""
    valid_BM, groups_BMS, shared = plan.entries_BN >= 0, plan.group_mask_BNS, plan.heads_BNh is None
    rows_BM = plan.entries_BN.clamp(min=0) if plan.rows_BN is None else plan.rows_BN

    def each_head(marks_BM: Tensor) -> Tensor:
        return marks_BM if shared else marks_BM.repeat_interleave(kv_heads, 0)

    keep_RM = valid_BM
    if plan.heads_BNh is not None:
        keep_RM = (plan.heads_BNh & valid_BM[..., None]).transpose(1, 2).flatten(0, 1)
    kinds = [Kind(False, False, keep_RM, form)]
    flags_RSM = piece_bit = None
    bit_of: list[int] = []
    if groups_BMS is not None:
        flags_RSM, piece_bit = _bits(groups_BMS, kv_heads, width, layout, shared)
        bit_of = _bit_of(groups_BMS.shape[-1], kv_heads, width, layout)
        bit_of = bit_of if shared else list(range(len(bit_of) // kv_heads))
        whole_RM = each_head(groups_BMS.all(-1))
        kinds = [Kind(True, False, keep_RM & ~whole_RM, form), Kind(False, False, keep_RM & whole_RM, form)]
    if plan.cut_keys is not None:
        cut_RM = each_head(plan.cut_keys.entries_BN)
        kinds = [replace(x, cut=cut, marks_RM=x.marks_RM & (cut_RM == cut)) for x in kinds for cut in (True, False)]
    if form.run > 1:  # the first entries fill runs, the others stay in the model's dtype
        sorted_kinds, kinds = kinds, []
        for kind in sorted_kinds:
            early_RM = kind.marks_RM.cumsum(-1) <= form.rounded(kind.marks_RM.sum(-1, keepdim=True))
            kinds.append(replace(kind, marks_RM=kind.marks_RM & early_RM))
            kinds.append(replace(kind, marks_RM=kind.marks_RM & ~early_RM, form=MODEL))
    channels = 0 if plan.cut_keys is None else plan.cut_keys.kept
    return PlanMarks(each_head(rows_BM), kinds, flags_RSM, piece_bit, bit_of, each_head(valid_BM), channels)


def read_counts(
    plans: Sequence[LayerPlan], kv_heads: int, width: int, layout: Layout, forms: Sequence[Format]
) -> list[RowCounts]:
    """Sort the entries of layers by how their own formats store them, and read how many there are, all at once."""
    marks = [plan_marks(plan, kv_heads, width, layout, own) for plan, own in zip(plans, forms, strict=True)]
    numbers = [each.numbers() for each in marks]
    flat = iter(torch.cat([each.flatten().to(numbers[0].device) for each in numbers]).tolist())
    rows = [[[next(flat) for _ in range(each.shape[1])] for _ in range(each.shape[0])] for each in numbers]
    return [_counts(own, each) for own, each in zip(marks, rows, strict=True)]


def _counts(marks: PlanMarks, rows: list[list[int]]) -> RowCounts:
    num_kinds, routed = len(marks.kinds), sum(kind.routed for kind in marks.kinds)
    bits = 0 if marks.flags_RSM is None else marks.flags_RSM.shape[1]
    starts = [1 + num_kinds + bits * i for i in range(routed)]
    by_bit = [[row[start : start + bits] for row in rows] for start in starts]
    return RowCounts(marks, max(row[0] for row in rows), [tuple(row[1 : 1 + num_kinds]) for row in rows], by_bit)


def _bit_of(num_groups: int, kv_heads: int, width: int, layout: Layout) -> list[int]:
    if layout == "per_head":
        return list(range(num_groups)) * kv_heads
    group_width = kv_heads * width // num_groups
    return [start // group_width for start in range(0, kv_heads * width, math.gcd(group_width, width))]


def _bits(groups_BMS: Tensor, kv_heads: int, width: int, layout: Layout, shared: bool) -> tuple[Tensor, Tensor]:
    """Return flags of what entries store, bool [R, S, M], and which flag rules each piece, int32 [P]."""
    device = groups_BMS.device
    piece_bit = sent(_bit_of(groups_BMS.shape[-1], kv_heads, width, layout), torch.int32, device)
    flags_BSM = groups_BMS.transpose(1, 2)
    if shared:
        return flags_BSM, piece_bit
    flags_BPM = flags_BSM.index_select(1, piece_bit)
    pieces = len(piece_bit) // kv_heads
    by_head = flags_BPM.reshape(len(flags_BPM) * kv_heads, pieces, flags_BPM.shape[-1])
    return by_head, torch.arange(pieces, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Packing:
    """Settings by which a layer is stored; ``feedback_Bhdd`` is that of ``BalancedBasis``, or None."""

    layout: Layout = "contiguous"
    form: Format = MODEL
    feedback_Bhdd: Tensor | None = None


def pack_layer(
    key_BhNd: Tensor,
    value_BhNd: Tensor,
    plan: LayerPlan,
    packing: Packing,
    position_BN: Tensor | None = None,
    counts: RowCounts | None = None,
    fill_BV: Tensor | None = None,
) -> list[Block]:
    """Pack the kept entries of a layer into blocks: rows that keep equally many entries of each kind share one.

    ``position_BN``: of the rows, in a layer with a window. ``counts``: of ``read_counts`` by the same packing; None:
    they are read now. ``fill_BV``: what pieces that are not stored read as, [B or 1, h * d]; stored ones go without it.
    """
    batch, kv_heads, length, width = key_BhNd.shape
    counts = counts or read_counts([plan], kv_heads, width, packing.layout, [packing.form])[0]
    marks = counts.marks if counts.marks.rows_RM.device == key_BhNd.device else on_device(counts.marks, key_BhNd.device)
    num_rows, form, fed = len(marks.rows_RM), packing.form, packing.feedback_Bhdd
    pieces = len(marks.bit_of) * num_rows // (batch * kv_heads) or 1  # of a head
    whole = all(each % form.per_code == 0 for each in (width, width // pieces, marks.channels))
    served = whole and key_BhNd.dtype == value_BhNd.dtype in DTYPES and width <= 256
    fused = served and not (form.mixes and plan.cut_keys) and choose_kernel(key_BhNd.device.type).path == "triton"
    keys, values = (x if fused else x.reshape(num_rows, -1, length, width) for x in (key_BhNd, value_BhNd))
    beside = None if position_BN is None else position_BN.int().repeat_interleave(num_rows // batch, 0)
    fill_Rc1d = None if fill_BV is None else fill_BV.expand(batch, -1).reshape(num_rows, -1, 1, width)
    feedback_Rcdd = None if fed is None else fed.reshape(num_rows, -1, width, width)
    places = marks.rows_RM, marks.kinds, marks.flags_RSM
    layer = _Rows(keys, values, *places, _channels(plan), beside, fill_Rc1d, feedback_Rcdd)
    blocks, alike = [], grouped((each, row) for row, each in enumerate(counts.kinds))
    table = torch.zeros(num_rows, len(marks.kinds), len(Field), dtype=torch.int64)
    for sizes, members in alike.items():
        rows = None if len(alike) == 1 else sent(members, torch.int64, key_BhNd.device)
        one = slice(members[0], members[0] + 1) if len(members) == 1 else rows  # a row is not copied
        own = layer if rows is None or fused else each_tensor(layer, itemgetter(one))
        held = [number for number, size in enumerate(sizes) if size or number == len(sizes) - 1]
        parts = []
        for number in held:
            routed = counts.bits[number] if marks.kinds[number].routed else []
            bounds = [0, *accumulate(routed[row][bit] for row in members if routed for bit in marks.bit_of)]
            shape = len(members), kv_heads * batch // num_rows, sizes[number]
            parts.append((_room if fused else _written)(own, marks.piece_bit, number, shape, bounds))
        cut = any(part.cut for part in parts)
        channels = layer.channels_Rck if rows is None else each_tensor(layer.channels_Rck, itemgetter(rows))
        blocks.append(Block(rows, parts, channels if cut else None, numbers=None if rows is None else members))
        for number, part in zip(held, parts, strict=True) if fused else ():
            first, step = torch.tensor([*addresses(blocks[-1], part).values()]).T
            table[members, number] = first + step * torch.arange(len(members))[:, None]
    if fused and (most := max(max(sizes) for sizes in alike)):
        from subtoken_train.kernels.triton_pack import launch_packing

        launch_packing(layer, form, table.to(key_BhNd.device, non_blocking=True), pieces, len(counts.bits), most)
    return blocks


@dataclass(frozen=True)
class _Rows:
    """Hold what some rows of a layer store, and by what; the first axis of all tensors is theirs."""

    keys_RcNd: Tensor  # [B, h, N, d], as the values, where one launch writes all
    values_RcNd: Tensor
    own_RM: Tensor
    kinds: list[Kind]
    flags_RSM: Tensor | None
    channels_Rck: Tensor | None
    position_RN: Tensor | None
    fill_Rc1d: Tensor | None
    feedback_Rcdd: Tensor | None


def _written(own: _Rows, piece_bit: Tensor | None, number: int, shape: Sequence[int], bounds: list[int]) -> BlockPart:
    """Return the part of one kind of so many rows, heads and entries, as torch writes it."""
    kind = own.kinds[number]
    rows, count = len(kind.marks_RM), shape[2]
    places_RM = torch.nonzero_static(kind.marks_RM, size=rows * count)[:, 1].view(rows, count)  # ascending
    index = own.own_RM.gather(1, places_RM)
    key_RcMd = take_entries(own.keys_RcNd, index, own.channels_Rck if kind.cut else None)
    stored, value_RcMd = stored_keys(kind.form, key_RcMd, own.feedback_Rcdd), take_entries(own.values_RcNd, index)
    stands = None if own.position_RN is None else own.position_RN.gather(1, index)
    if not kind.routed:
        return BlockPart(stored, kind.form.store(value_RcMd), kind.cut, stands)
    assert own.flags_RSM is not None
    assert piece_bit is not None
    flags = own.flags_RSM.gather(2, places_RM[:, None].expand(-1, own.flags_RSM.shape[1], -1))
    value_RcMd = value_RcMd if own.fill_Rc1d is None else value_RcMd - own.fill_Rc1d
    heads = value_RcMd.shape[1]
    per_head = len(piece_bit) // heads
    pieces_RPMw = value_RcMd.reshape(rows, heads, count, per_head, -1).transpose(2, 3).flatten(1, 2)
    stored_n = torch.nonzero_static(flags.index_select(1, piece_bit).flatten(), size=bounds[-1])[:, 0]
    pieces_nw = pieces_RPMw.flatten(0, 2).index_select(0, stored_n)
    pieces = stored.format.store_pieces(pieces_nw, stored_n, (rows, heads, count), per_head)
    return BlockPart(stored, with_index(pieces, flags, piece_bit, stored, bounds), kind.cut, stands)


def _room(own: _Rows, piece_bit: Tensor | None, number: int, shape: tuple[int, ...], bounds: list[int]) -> BlockPart:
    """Return the same part with nothing written to it yet."""
    kind, width, (rows, heads, size) = own.kinds[number], own.keys_RcNd.shape[3], shape
    form, new, dtype = kind.form, own.keys_RcNd.new_empty, own.keys_RcNd.dtype

    def payload(part: Part, lead: tuple[int, ...], width: int) -> Payload:
        data = new(*lead, form.code_width(width), dtype=form.code_dtype(dtype))
        scale = new(form.scale_shape(shape, width, part), dtype=torch.float16) if form.rounds else None
        return Payload(data, scale, dtype, form)

    keys = payload("keys", shape, width if own.channels_Rck is None or not kind.cut else own.channels_Rck.shape[2])
    stands = None if own.position_RN is None else new(rows, size, dtype=torch.int32)
    if not kind.routed:
        return BlockPart(keys, payload("values", shape, width), kind.cut, stands)
    assert own.flags_RSM is not None
    assert piece_bit is not None
    flags = None if _all_alike(bounds, size) else new(rows, own.flags_RSM.shape[1], -(-size // 8), dtype=torch.uint8)
    offsets = sent(bounds[:-1], torch.int32, piece_bit.device)
    pieces = payload("pieces", (bounds[-1],), width * heads // len(piece_bit))
    values = RoutedValues(flags, pieces, offsets, piece_bit.clone(), size, heads, bounds)
    return BlockPart(keys, values, kind.cut, stands)


def _channels(plan: LayerPlan) -> Tensor | None:
    """Return the numbers of the channels that cut keys keep, [R, c, k]; None where no key is cut."""
    if plan.cut_keys is None:
        return None
    assert plan.cut_keys.channels_Bhd is not None
    batch, heads, width = plan.cut_keys.channels_Bhd.shape
    found = torch.nonzero_static(plan.cut_keys.channels_Bhd, size=batch * heads * plan.cut_keys.kept)[:, 2]
    channels_Bhk = found.view(batch, heads, -1).to(torch.uint8 if width <= 256 else torch.int16)
    return channels_Bhk if plan.heads_BNh is None else channels_Bhk.flatten(0, 1)[:, None]


def with_index(
    pieces: Payload, flags_RSM: Tensor, piece_bit: Tensor, keys: Payload, bounds: list[int] | None = None
) -> RoutedValues:
    """Index stored pieces by their entries, where not all of a row store the same (``flags_RSM``, bool, by bits).

    ``bounds`` of the result are read from the device where None.
    """
    counts, entries = flags_RSM.sum(-1, dtype=torch.int32).index_select(1, piece_bit).flatten(), flags_RSM.shape[-1]
    offsets = counts.cumsum(0, dtype=torch.int32) - counts
    bounds = bounds or [*offsets.tolist(), len(pieces.data)]
    own = piece_bit.clone()  # a layer is counted, and written to a file, with its own
    index = None if _all_alike(bounds, entries) else pack_bits(flags_RSM)
    return RoutedValues(index, pieces, offsets, own, entries, keys.data.shape[1], bounds)


def _all_alike(bounds: list[int], entries: int) -> bool:
    """Return whether every piece is stored by all of a row's entries or by none: the offsets say which then."""
    return all(end - start in (0, entries) for start, end in pairwise(bounds))


@dataclass(frozen=True)
class PageReading:
    """Settings of how much of a layer a step reads: ``least`` pages, what is left over after the whole ones being one.

    It chooses among the marked entries of the plan, up to ``budget_B`` of them, int64; pages with others are always
    read.
    """

    size: int
    least: int
    chosen_BM: Tensor
    budget_B: Tensor


def with_pages(blocks: Sequence[tuple[Block, PageReading]]) -> list[list[Block]]:
    """Give blocks page indices; rows that read other numbers of pages get their own blocks. The device is read once."""
    found, made = [_pages(*each) for each in blocks], []
    counted = [count_R.to(found[0][1].device) for _, count_R in found]
    known = iter(torch.cat(counted).tolist() if counted else ())
    for (block, reading), (forced_RP, count_R) in zip(blocks, found, strict=True):
        counts = list(islice(known, len(count_R)))
        rows = [(count, [row for row, each in enumerate(counts) if each == count]) for count in sorted(set(counts))]
        made.append([_block_of_pages(block, reading.size, forced_RP, *own) for own in rows])
    return made


def _pages(block: Block, reading: PageReading) -> tuple[Tensor, Tensor]:
    """Return the whole pages that a step always reads, bool [R, P], and how many it reads in all, int64 [R]."""
    (part,), device = block.parts, reading.chosen_BM.device
    rows_R = torch.arange(block.num_rows, device=device) if block.rows is None else block.rows
    size, number = reading.size, part.entries // reading.size
    chosen_RM = reading.chosen_BM[rows_R, : part.entries]
    forced_RP = ~chosen_RM[:, : number * size].reshape(block.num_rows, number, size).all(-1)
    if number * size == part.entries:
        forced_RP[:, -1:].fill_(True)  # the latest entries; a page that is begun holds them otherwise
    free_R = (~forced_RP).sum(-1)
    always_R = chosen_RM.sum(-1) - free_R * size  # of those it chooses among; only forced pages hold others
    spare_R = (reading.budget_B[rows_R] - always_R).clamp(min=0) // size
    begun = int(chosen_RM.shape[1] > number * size)
    return forced_RP, (number - free_R + spare_R).clamp(min=reading.least - begun).clamp(max=number)


def _block_of_pages(block: Block, size: int, forced_RP: Tensor, count: int, own: list[int]) -> Block:
    (part,), number, rows, numbers = block.parts, forced_RP.shape[1], block.rows, block.numbers
    if len(own) < block.num_rows:
        own_R, all_numbers = sent(own, torch.int64, forced_RP.device), numbers or range(block.num_rows)
        part, forced_RP, rows = select_part(part, own_R), forced_RP[own_R], own_R if rows is None else rows[own_R]
        numbers = [all_numbers[row] for row in own]
    made = Block(rows, [part], numbers=numbers)
    if count < number:
        keys_RcMd = part.keys.read()[:, :, : number * size]
        by_page = keys_RcMd.reshape(*keys_RcMd.shape[:2], number, size, keys_RcMd.shape[-1])
        made.pages = PageIndex(size, count, by_page.amin(3), by_page.amax(3), forced_RP)
    return made
