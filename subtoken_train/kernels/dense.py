"""Packed entries in full: keys with 0 in channels that are cut, values with 0 in pieces that are not stored.

Legend: R rows of a block, c heads of a row, M entries of a part, d head width, P pieces of an entry, w channels of one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subtoken_train.kernels.storage import Block, BlockPart, Payload, RoutedValues


def dense_keys(part: BlockPart, block: Block, width: int) -> Tensor:
    """A part's keys, [R, c, M, d] with d = ``width``, in the model's dtype."""
    keys = part.keys.read()
    if not part.cut:
        return keys
    assert block.channels is not None
    index = block.channels.long()[:, :, None].expand_as(keys)
    return keys.new_zeros(*keys.shape[:3], width).scatter(3, index, keys)


def dense_values(part: BlockPart) -> Tensor:
    """A part's values, [R, c, M, d], in the model's dtype."""
    values = part.values
    if isinstance(values, Payload):
        return values.read()
    flags_RPM, pieces = stored_flags(values), values.pieces.read()
    dense = pieces.new_zeros(*flags_RPM.shape, pieces.shape[-1])
    dense[flags_RPM] = pieces
    by_head = dense.view(len(dense), values.heads, -1, part.entries, pieces.shape[-1])
    return by_head.transpose(2, 3).flatten(3)


def stored_flags(values: RoutedValues) -> Tensor:
    """Which pieces each entry stores, bool [R, P, M]."""
    bounds = torch.tensor(values.bounds, device=values.offsets.device)
    bag_n = torch.arange(len(values.offsets), device=bounds.device).repeat_interleave(bounds.diff())
    flags = torch.zeros(len(values.offsets), values.entries, dtype=torch.bool, device=bounds.device)
    flags[bag_n, values.places().long() % values.entries] = True
    return flags.view(-1, len(values.piece_bit), values.entries)
