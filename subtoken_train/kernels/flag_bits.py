"""Flags of stored pieces, eight to a byte.

Legend: R rows of a block, S flags of an entry, M entries.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_flags(flags_RSM: Tensor) -> Tensor:
    """Eight flags a byte, the first in the lowest bit, uint8 [R, S, ceil(M / 8)]."""
    missing = -flags_RSM.shape[-1] % 8
    padded_RSM = torch.nn.functional.pad(flags_RSM.to(torch.uint8), (0, missing))
    places = torch.arange(8, dtype=torch.uint8, device=flags_RSM.device)
    packed: Tensor = (padded_RSM.view(*padded_RSM.shape[:2], -1, 8) << places).sum(-1, dtype=torch.uint8)
    return packed


def unpack_flags(packed: Tensor, entries: int) -> Tensor:
    """The flags, bool [R, S, M]."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> places & 1).bool().flatten(-2)[..., :entries]
