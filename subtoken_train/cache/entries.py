"""Entries of packed blocks while tokens are evicted: which they are, and keeping some of them and of a tail.

Of what was stored some is *selected*, nothing is rounded again; a tail's entries become whole ones. A row's stored
entries are counted part after part: their *order of storage*.

Legend: R rows (all of the cache, or of a block), c heads of a row, M stored entries, T tail tokens, N = M + T, d head
width, P pieces of an entry, S bits of an entry, n stored pieces, B batch, h key-value heads, H query heads, q new
tokens, k statistics of a head.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from subtoken_train.cache.by_sample import select_part
from subtoken_train.cache.pack import with_index
from subtoken_train.functional.gather import kept_index, take_entries
from subtoken_train.kernels.formats import Format, Payload, concatenated
from subtoken_train.kernels.native import stored_keys
from subtoken_train.kernels.storage import Block, BlockPart, Fill, RoutedValues, dense_keys, dense_values, stored_flags
from subtoken_train.types import LayerPlan, Region

STAYS = 128  # added to the region of an entry that never competes


@dataclass
class EvictionState:
    """State of one layer's entries for evictions while tokens are decoded."""

    place_RM: Tensor  # number of each entry among all tokens that the layer has seen of its sample, from 0; -1 pads
    region_RM: Tensor  # its ``Region``, plus ``STAYS`` where it never competes, uint8
    seen_B: Tensor  # tokens that the layer has seen of each sample, without the tail, int64
    budget_B: Tensor  # competing entries that may stay, int64
    observed: int | None  # last query rows that are wanted; None: all since they were last read
    carried_RkN: Tensor | None = None  # what the method noted of the entries and the first tail tokens
    given: int = 0  # first tokens of the tail that belong to the prompt; they never compete
    queries: deque[Tensor] = field(default_factory=deque)  # of the last tokens, rotated, [B, H, q, d] each
    held: int = 0  # rows of these in all
    reads_inputs: bool = False
    inputs: list[Tensor] = field(default_factory=list)
    """The layer's projected states of tokens since the method looked last, [B, q, D] each, if it ``reads_inputs``."""

    @classmethod
    def of_prompt(
        cls,
        plan: LayerPlan,
        regions_BM: Tensor,
        competes_BM: Tensor,
        budget_B: Tensor,
        observed: int | None,
        carried_BkM: Tensor | None,
        reads_inputs: bool = False,
    ) -> Self:
        """Build the state of a layer as ``pack_layer`` packs it: routed entries first, of each kind cut keys first."""
        valid_BN = plan.entries_BN >= 0
        rows_BN = (plan.entries_BN if plan.rows_BN is None else plan.rows_BN).clamp(min=0)
        whole_BN = torch.ones_like(valid_BN) if plan.group_mask_BNS is None else plan.group_mask_BNS.all(-1)
        cut_BN = torch.zeros_like(valid_BN) if plan.cut_keys is None else plan.cut_keys.entries_BN
        kind_BN, held_RN, heads = 2 * whole_BN + ~cut_BN, valid_BN, 1
        if plan.heads_BNh is not None:
            heads = plan.heads_BNh.shape[-1]
            held_RN = (plan.heads_BNh & valid_BN[..., None]).transpose(1, 2).flatten(0, 1)
            rows_BN, kind_BN = (x.repeat_interleave(heads, 0) for x in (rows_BN, kind_BN))
        kind_RN = torch.where(held_RN, kind_BN, 4)
        order_RN = kind_RN.sort(dim=-1, stable=True).indices[:, : int(held_RN.sum(-1).max())]
        row_RM, kept_RM = rows_BN.gather(1, order_RN), held_RN.gather(1, order_RN)
        entries_BM = regions_BM != Region.PADDING
        by_sample = entries_BM.cumsum(-1) - 1, regions_BM + STAYS * ~competes_BM
        place_RM, region_RM = (x.repeat_interleave(heads, 0).gather(1, row_RM) for x in by_sample)
        carried = None
        if carried_BkM is not None:
            by_row = carried_BkM.reshape(len(carried_BkM) * heads, -1, carried_BkM.shape[2])
            carried = by_row.gather(2, row_RM[:, None].expand(-1, by_row.shape[1], -1))
        return cls(
            place_RM.masked_fill(~kept_RM, -1).int(),
            region_RM.masked_fill(~kept_RM, Region.PADDING).to(torch.uint8),
            entries_BM.sum(-1),
            budget_B,
            observed,
            carried,
            reads_inputs=reads_inputs,
        )

    def copy(self) -> Self:
        """Return an independent state of the same entries."""
        return replace(self, queries=deque(self.queries), inputs=list(self.inputs))

    def note(self, query_BHqd: Tensor) -> None:
        """Keep the queries of new tokens while a method wants them."""
        if self.observed == 0:
            return
        self.queries.append(query_BHqd)
        self.held += query_BHqd.shape[2]
        while self.observed is not None and self.held - self.queries[0].shape[2] >= self.observed:
            self.held -= self.queries.popleft().shape[2]

    def with_tail(self, tail: int, start_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (places, regions with ``STAYS``) of entries and tail tokens, [R, N] each."""
        places_T = torch.arange(tail, device=self.place_RM.device)
        start_B1 = torch.zeros_like(self.seen_B)[:, None] if start_B is None else start_B[:, None]
        region_T = torch.where(places_T < self.given, Region.QUERY + STAYS, int(Region.GENERATED))
        region_BT = torch.where(places_T < start_B1, int(Region.PADDING), region_T)
        place_BT = self.seen_B[:, None] + places_T - start_B1
        heads = len(self.place_RM) // len(self.seen_B)
        pairs = ((self.place_RM, place_BT), (self.region_RM, region_BT))
        place_RN, region_RN = (torch.cat([x.long(), y.repeat_interleave(heads, 0)], 1) for x, y in pairs)
        return place_RN, region_RN

    def carry(self, carried_RkN: Tensor | None) -> None:
        """Store what the method noted of all entries and tail tokens, and drop the queries and inputs it has read."""
        self.carried_RkN = carried_RkN
        self.queries.clear()
        self.inputs.clear()
        self.held = 0

    def carried(self, tail: int) -> Tensor | None:
        """Return what the method noted, 0 for the tail's tokens since, [R, k, N]."""
        if self.carried_RkN is None:
            return None
        return F.pad(self.carried_RkN, (0, self.place_RM.shape[1] + tail - self.carried_RkN.shape[2]))

    def keep(self, keep_RN: Tensor, tail: int, start_B: Tensor | None) -> None:
        """Keep the marked entries and tail tokens, in their order."""
        index_RM, valid_RM = kept_index(keep_RN, pad_left=False)
        place_RN, region_RN = self.with_tail(tail, start_B)
        self.place_RM = place_RN.gather(1, index_RM).masked_fill(~valid_RM, -1).int()
        self.region_RM = region_RN.gather(1, index_RM).masked_fill(~valid_RM, Region.PADDING).to(torch.uint8)
        if self.carried_RkN is not None:
            assert self.carried_RkN.shape[2] == keep_RN.shape[1]
            self.carried_RkN = self.carried_RkN.gather(2, index_RM[:, None].expand(-1, self.carried_RkN.shape[1], -1))
        self.seen_B = self.seen_B + tail - (0 if start_B is None else start_B)
        self.given = 0

    def select(self, samples: Tensor) -> None:
        """Keep the samples, in that order."""
        heads = len(self.place_RM) // len(self.seen_B)
        rows_R = (samples[:, None] * heads + torch.arange(heads, device=samples.device)).flatten()
        stored, longest = self.place_RM.shape[1], int((self.place_RM[rows_R] >= 0).sum(-1).max())
        self.place_RM, self.region_RM = self.place_RM[rows_R, :longest], self.region_RM[rows_R, :longest]
        self.seen_B, self.budget_B = self.seen_B[samples], self.budget_B[samples]
        if self.carried_RkN is not None:
            chosen = self.carried_RkN[rows_R]
            self.carried_RkN = torch.cat([chosen[..., :longest], chosen[..., stored:]], -1)
        self.queries = deque(query[samples] for query in self.queries)
        self.inputs = [noted[samples] for noted in self.inputs]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the state."""
        parts = [self.place_RM, self.region_RM, self.seen_B, self.budget_B, *self.queries, *self.inputs]
        return sum(part.nbytes for part in parts) + (0 if self.carried_RkN is None else self.carried_RkN.nbytes)


def read_keys(blocks: list[Block], rows: int) -> Tensor:
    """Return all rows' keys in the order of storage, [R, c, M, d]; 0 in cut channels and after a row's last entry."""
    return _dense(blocks, rows, dense_keys)


def read_values(blocks: list[Block], rows: int, fill: Fill | None = None) -> Tensor:
    """Return their values; a piece that is not stored reads as ``fill``, or as 0 without one."""

    def read(part: BlockPart, block: Block, width: int) -> Tensor:
        values = dense_values(part)
        if fill is None or isinstance(part.values, Payload):
            return values
        own = fill.of_rows(block.heads, values.dtype)
        return values + (own if block.rows is None else own[block.rows])

    return _dense(blocks, rows, read)


def _dense(blocks: list[Block], rows: int, read: Callable[[BlockPart, Block, int], Tensor]) -> Tensor:
    most = max(sum(part.entries for part in block.parts) for block in blocks)
    like = _payload(blocks[0].parts[-1]).read()  # entries stored whole are the last
    dense = like.new_zeros(rows, blocks[0].heads, most, like.shape[-1], dtype=blocks[0].parts[-1].keys.dtype)
    for block in blocks:
        held = torch.cat([read(part, block, dense.shape[-1]).to(dense.dtype) for part in block.parts], 2)
        dense[slice(None) if block.rows is None else block.rows, :, : held.shape[2]] = held
    return dense


def keep_entries(blocks: list[Block], keep_RN: Tensor, tail: BlockPart, settles_R: Tensor, form: Format) -> list[Block]:
    """Return blocks of the marked entries of a layer and its tail.

    ``keep_RN``: the stored entries in their order, to the longest row, then the tail's, bool. ``settles_R``: rows whose
    tail is stored in ``form``, bool; that of the others stays in the model's dtype meanwhile.
    """
    stored = keep_RN.shape[1] - tail.entries
    groups: dict[tuple[tuple[int, int], ...], list[_Rows]] = {}
    for block in blocks:
        rows_R = torch.arange(len(keep_RN), device=keep_RN.device) if block.rows is None else block.rows
        sizes = [part.entries for part in block.parts]
        marks = [*keep_RN[rows_R, : sum(sizes)].split_with_sizes(sizes, 1), keep_RN[rows_R, stored:]]
        held = list(zip([*block.parts, select_part(tail, rows_R)], marks, strict=True))
        counts_RK = torch.stack([mark.sum(-1) for mark in marks] + [settles_R[rows_R].long()], -1).tolist()
        for alike in dict.fromkeys(map(tuple, counts_RK)):
            own_R = torch.tensor([i for i, each in enumerate(counts_RK) if tuple(each) == alike], device=rows_R.device)
            kinds = _by_kind([_select(part, own_R, mark) for part, mark in held], bool(alike[-1]), form)
            key = tuple((kind, part.entries) for kind, part in kinds.items())
            channels = None if block.channels is None else block.channels[own_R]
            groups.setdefault(key, []).append(_Rows(rows_R[own_R], list(kinds.values()), channels))
    return [_block(members, len(keep_RN)) for members in groups.values()]


@dataclass
class _Rows:
    """Rows of the cache that have equally many entries of each kind, and these; ``channels`` as in ``Block``."""

    rows: Tensor
    parts: list[BlockPart]
    channels: Tensor | None


WHOLE, FRESH = 3, 4


def _by_kind(parts: list[BlockPart], settles: bool, form: Format) -> dict[int, BlockPart]:
    """Join parts by kind, in the order of ``pack_layer``, then those that are not rounded yet."""
    kinds: dict[int, list[BlockPart]] = {}
    for part in parts:
        kind, own = 2 * isinstance(part.values, Payload) + (not part.cut), part
        if kind == WHOLE and form.rounds and not part.keys.format.rounds:
            kind = FRESH
            if settles:
                kind, own = WHOLE, BlockPart(stored_keys(form, part.keys.read()), form.store(_payload(part).read()))
        kinds.setdefault(kind, []).append(own)
    joined = {kind: _joined(kinds[kind]) for kind in sorted(kinds)}
    return {kind: part for kind, part in joined.items() if part.entries or kind == WHOLE}


def _select(part: BlockPart, rows: Tensor, mark_RM: Tensor) -> BlockPart:
    if len(rows) < len(mark_RM):
        part, mark_RM = select_part(part, rows), mark_RM[rows]
    index_RM = mark_RM.nonzero()[:, 1].view(len(rows), -1)
    taken = partial(take_entries, index_RM=index_RM)
    keys, values = part.keys.each(taken), part.values
    if isinstance(values, Payload):
        return BlockPart(keys, values.each(taken), part.cut)
    flags_RPM = stored_flags(values)
    stays_n = mark_RM[:, None].expand_as(flags_RPM)[flags_RPM]
    kept_RPM = flags_RPM.gather(2, index_RM[:, None].expand(-1, flags_RPM.shape[1], -1))
    pieces = values.pieces.each(lambda data: data[stays_n], taken)
    return BlockPart(keys, _found(pieces, kept_RPM, values.piece_bit, keys), part.cut)


def _found(pieces: Payload, flags_RPM: Tensor, piece_bit: Tensor, keys: Payload) -> RoutedValues:
    """Call ``with_index`` from the flags of every piece: a bit is that of the first piece it rules."""
    ruled = (piece_bit == torch.arange(int(piece_bit.max()) + 1, device=piece_bit.device)[:, None]).int()
    return with_index(pieces, flags_RPM.index_select(1, ruled.argmax(1)), piece_bit, keys)


def _joined(parts: list[BlockPart], axis: int = 2) -> BlockPart:
    if len(parts) == 1:
        return parts[0]
    keys = concatenated([part.keys for part in parts], axis)
    values = [part.values for part in parts if isinstance(part.values, RoutedValues)]
    if not values:
        return BlockPart(keys, concatenated([_payload(part) for part in parts], axis), parts[0].cut)
    flags_RPM, pieces = torch.cat([stored_flags(each) for each in values]), concatenated([x.pieces for x in values], 0)
    return BlockPart(keys, _found(pieces, flags_RPM, values[0].piece_bit, keys), parts[0].cut)


def _payload(part: BlockPart) -> Payload:
    assert isinstance(part.values, Payload)
    return part.values


def _block(members: list[_Rows], count: int) -> Block:
    parts = [_joined(list(of_kind), 0) for of_kind in zip(*(each.parts for each in members), strict=True)]
    rows = torch.cat([each.rows for each in members])
    channels = None
    if any(part.cut for part in parts):
        channels = torch.cat([each.channels for each in members if each.channels is not None])
    if len(members) > 1:
        order = rows.argsort()
        rows, parts = rows[order], [select_part(part, order) for part in parts]
        channels = None if channels is None else channels[order]
    return Block(None if len(rows) == count else rows, parts, channels)
