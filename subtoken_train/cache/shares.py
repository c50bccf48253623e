"""Whose bytes are whose: a packed layer's storage, divided among the samples of its batch.

Legend: B batch, h key-value heads, R rows of a block, c heads of a row, P pieces of a row, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

from subtoken_train.cache.cache import PackedLayer
from subtoken_train.kernels.storage import Block, Payload


@dataclass
class Share:
    """One sample's part of a packed layer.

    Attributes:
        total_bytes: everything that is stored for it, index included.
        routed_bytes: of entries whose values are stored in part: keys, pieces and what finds them.
        index_bytes: of them, those that find the pieces.
        routed_channels: value channels that are stored of those entries, in all heads.
    """

    total_bytes: int = 0
    routed_bytes: int = 0
    index_bytes: int = 0
    routed_channels: int = 0


def sample_shares(layer: PackedLayer) -> list[Share]:
    """A share per sample; their ``total_bytes`` add up to the layer's payload and index bytes.

    What a block stores once for all of its rows is divided among them.
    """
    batch, heads, _, width = layer.keys.shape
    shares = [Share() for _ in range(batch)]
    for block in layer.blocks:
        count, own = block.whole_keys.data.shape[:2]
        rows = range(count) if block.rows is None else block.rows.tolist()
        per_sample = 1 if own == heads else heads
        index_row = 0 if block.rows is None else block.rows.element_size()
        whole = block.whole_keys.nbytes // count + block.whole_values.nbytes // count
        for place, row in enumerate(rows):
            share = shares[row // per_sample]
            payload, index, channels = _routed(block, place, count, width)
            share.total_bytes += whole + index_row + payload + index
            share.routed_bytes += payload + index
            share.index_bytes += index
            share.routed_channels += channels
    return shares


def slice_bytes(layer: PackedLayer) -> int:
    """Bytes of the key and the value of one head of an entry that is stored whole."""
    block = layer.blocks[0]
    return vector_bytes(block.whole_keys) + vector_bytes(block.whole_values)


def vector_bytes(payload: Payload) -> int:
    """Bytes of one vector of a payload, its scale included."""
    scale = 0 if payload.scale is None else payload.scale.element_size()
    return payload.data.shape[-1] * payload.data.element_size() + scale


def _routed(block: Block, place: int, count: int, width: int) -> tuple[int, int, int]:
    """(bytes of keys and pieces, bytes of the index, value channels) of one row's routed entries."""
    values = block.routed_values
    if values is None:
        return 0, 0, 0
    assert block.routed_keys is not None
    pieces = len(values.piece_bit)
    stored = values.bounds[(place + 1) * pieces] - values.bounds[place * pieces]
    in_index = values.index.element_size() * stored
    if values.index.dim() > 1:  # bits: as many for every row
        in_index = values.index.nbytes // count
    shared = values.piece_bit.nbytes
    payload = block.routed_keys.nbytes // count + stored * vector_bytes(values.pieces)
    index = in_index + values.offsets.element_size() * pieces + shared // count + (place < shared % count)
    return payload, index, stored * (width * values.heads // pieces)
