"""Packed blocks by sample: choose samples (batch selection, beam search), and say whose bytes are whose.

Legend: B batch, h key-value heads, R rows of a block, c heads of a row, P pieces of a row, n stored pieces, d head
width, T tail tokens.
"""

from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor

from subtoken_train.functional.gather import each_tensor
from subtoken_train.kernels.formats import Payload
from subtoken_train.kernels.storage import Block, BlockPart, RoutedValues


def select_samples(blocks: list[Block], samples: list[int], kv_heads: int) -> list[Block]:
    """Return the blocks of a batch of the chosen samples, in their order; a sample may come several times."""
    chosen = []
    for block in blocks:
        per_sample = 1 if block.heads == kv_heads else kv_heads
        place = {row: i for i, row in enumerate(range(block.num_rows) if block.rows is None else block.rows.tolist())}
        wanted = [
            (place[sample * per_sample + part], new * per_sample + part)
            for new, sample in enumerate(samples)
            for part in range(per_sample)
            if sample * per_sample + part in place
        ]
        if wanted:
            device = block.parts[0].keys.data.device
            index = torch.tensor([old for old, _ in wanted], device=device)
            rows = torch.tensor([new for _, new in wanted], device=device)
            parts = [select_part(part, index) for part in block.parts]
            channels = each_tensor(block.channels, itemgetter(index))
            pages = each_tensor(block.pages, itemgetter(index))
            chosen.append(Block(None if len(wanted) == len(samples) * per_sample else rows, parts, channels, pages))
    return chosen


def select_part(part: BlockPart, index_R: Tensor) -> BlockPart:
    """Copy the entries and pieces of some rows."""
    values, of_rows = part.values, itemgetter(index_R)
    keys, position_RM = part.keys.each(of_rows), each_tensor(part.position_RM, of_rows)
    if not isinstance(values, RoutedValues):
        return BlockPart(keys, values.each(of_rows), part.cut, position_RM)
    pieces = len(values.piece_bit)
    ends = torch.cat([values.offsets[1:], values.offsets.new_tensor([len(values.pieces.data)])])
    counts_RP = (ends - values.offsets).view(-1, pieces)
    starts_R, lengths_R = values.offsets[::pieces][index_R], counts_RP.sum(-1)[index_R]
    new_starts_R = lengths_R.cumsum(0) - lengths_R
    within = torch.arange(int(lengths_R.sum()), device=index_R.device) - new_starts_R.repeat_interleave(lengths_R)
    counts, source = counts_RP[index_R].flatten(), starts_R.repeat_interleave(lengths_R) + within
    index = None if values.index is None else values.index[index_R]
    offsets = (counts.cumsum(0) - counts).int()
    chosen = values.pieces.each(lambda data: data[source], of_rows)
    values = replace(values, index=index, pieces=chosen, offsets=offsets, bounds=[])
    return BlockPart(keys, values, part.cut, position_RM)


@dataclass
class Share:
    """Bytes of one sample's part of a packed layer."""

    total_bytes: int = 0
    routed_bytes: int = 0  # of partly stored entries: keys, pieces, index and fill
    index_bytes: int = 0  # of these the index
    routed_channels: int = 0  # and the value channels
    channel_bytes: int = 0
    basis_bytes: int = 0
    unread_bytes: int = 0  # what one new token does not read


def sample_shares(blocks: list[Block], tail_BhTd: Tensor, fill_bytes: int = 0, basis_bytes: int = 0) -> list[Share]:
    """Return each sample's share of a layer's blocks, what is stored once divided; ``total_bytes`` add up."""
    batch, heads, _, width = tail_BhTd.shape
    filled, basis = fill_bytes // batch, basis_bytes // batch
    shares = [Share(filled + basis, routed_bytes=filled, basis_bytes=basis) for _ in range(batch)]
    for block in blocks:
        count = block.num_rows
        rows = range(count) if block.rows is None else block.rows.tolist()
        per_sample = 1 if block.heads == heads else heads
        index_row = 0 if block.rows is None else block.rows.element_size()
        channels, pages = (0 if x is None else x.nbytes // count for x in (block.channels, block.pages))
        for place, row in enumerate(rows):
            share = shares[row // per_sample]
            share.total_bytes += index_row + channels + pages
            share.channel_bytes += channels
            share.unread_bytes += block.unread_bytes // count
            for part in block.parts:
                share.total_bytes += 0 if part.position_RM is None else part.position_RM.nbytes // count
                if isinstance(part.values, RoutedValues):
                    _add_routed(share, part.keys, part.values, place, width)
                else:
                    share.total_bytes += sum(payload.nbytes // count for payload in part.payloads)
    return shares


def _add_routed(share: Share, keys: Payload, values: RoutedValues, place: int, width: int) -> None:
    count, pieces, own = len(keys.data), len(values.piece_bit), values.pieces
    stored = values.bounds[(place + 1) * pieces] - values.bounds[place * pieces]
    in_index = 0 if values.index is None else values.index.nbytes // count
    shared = values.piece_bit.nbytes
    index = in_index + values.offsets.element_size() * pieces + shared // count + (place < shared % count)
    channels = width * values.heads // pieces
    scales = 0 if own.scale is None else own.scale.nbytes // count
    routed = keys.nbytes // count + stored * own.data.shape[-1] * own.data.element_size() + scales + index
    share.total_bytes += routed
    share.routed_bytes += routed
    share.index_bytes += index
    share.routed_channels += stored * channels
