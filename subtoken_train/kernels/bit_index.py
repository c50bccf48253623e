"""Which pieces entries store, eight entries a byte, and the places of stored pieces found from that.

A step decodes the index with a few gathers over bytes and stored pieces, none over flags: how many pieces are stored is
known on the host, so that no shape depends on data and nothing waits for a device.

Legend: R rows of a block, c heads of a row, S bits of an entry, P pieces of an entry, M entries, b bytes of all (row,
piece), n stored pieces.
"""

from __future__ import annotations

import torch
from torch import Tensor

_tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
"""By device: of every byte the number of bits that are set; and of (byte, k) the place of its k-th set bit. 1.3 KB."""


def pack_bits(flags_RSM: Tensor) -> Tensor:
    """Eight flags a byte, the first in the lowest bit, uint8 [R, S, ceil(M / 8)]."""
    missing = -flags_RSM.shape[-1] % 8
    padded_RSM = torch.nn.functional.pad(flags_RSM.to(torch.uint8), (0, missing))
    places = torch.arange(8, dtype=torch.uint8, device=flags_RSM.device)
    packed: Tensor = (padded_RSM.view(*padded_RSM.shape[:2], -1, 8) << places).sum(-1, dtype=torch.uint8)
    return packed


def unpack_bits(packed_RSm: Tensor, entries: int) -> Tensor:
    """The flags of ``pack_bits``, bool [R, S, M]."""
    places = torch.arange(8, dtype=torch.uint8, device=packed_RSm.device)
    return (packed_RSm[..., None] >> places & 1).bool().flatten(-2)[..., :entries]


def prepare_bits(device: torch.device) -> None:
    """Make the tables of a device, once, before a step reads them."""
    if device not in _tables:
        bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
        nth = (1 - bits).sort(dim=1, stable=True).indices
        _tables[device] = bits.sum(1, dtype=torch.int32), nth.to(torch.uint8).flatten()


def places_in_bits(packed_RSm: Tensor, piece_bit: Tensor, heads: int, entries: int, stored: int) -> Tensor:
    """(row * c + head) * M + entry of every stored piece, ordered by row, then piece, then entry, int32 [n].

    Args:
        packed_RSm: of ``pack_bits``.
        piece_bit: which of the S bits rules each of the P pieces, int [P].
        heads: c.
        entries: M.
        stored: n.
    """
    device, (rows, _, per_piece) = packed_RSm.device, packed_RSm.shape
    count_256, nth = _tables[device]
    byte_b = packed_RSm.index_select(1, piece_bit).flatten().int()
    count_b = count_256.index_select(0, byte_b)
    owner_n = torch.repeat_interleave(count_b, output_size=stored)
    # of byte and rank among its set bits: the stored pieces before a byte are taken off their own numbers
    key_b = (byte_b << 3) + count_b - count_b.cumsum(0, dtype=torch.int32)
    key_n = key_b.index_select(0, owner_n).add_(torch.arange(stored, dtype=torch.int32, device=device))
    first_entry = torch.arange(0, 8 * per_piece, 8, dtype=torch.int32, device=device)
    head = torch.arange(rows * heads, dtype=torch.int32, device=device)[:, None, None]
    first_b = (head * entries + first_entry).expand(-1, len(piece_bit) // heads, -1).reshape(-1)
    return first_b.index_select(0, owner_n).add_(nth.index_select(0, key_n))
