"""Integers of rounded payloads as products take them: unscaled, a stretch that stays in a processor's cache at a time.

A product with a vector is that with its integers, times its scale; so no vector is ever scaled itself. Two codes of a
byte stay beside each other's halves: even channels come first, then the odd ones, and what they meet is put in the same
order, because that is one row of numbers and not a whole cache.

Legend: X = rows of a block times heads of a row, M entries, m of a stretch, G query rows of a head, d channels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from subtoken_train.kernels.paged import Picked
from subtoken_train.kernels.storage import Payload


def integers(payload: Payload) -> Tensor:
    """All codes as whole numbers in fp32, [..., d]; channels in ``stored_order``."""
    codes = payload.data
    if codes.dtype == torch.uint8:
        codes = torch.cat([codes & 15, codes >> 4], -1).view(torch.int8).sub_(8)
    return codes.float()


def stored_order(vectors: Tensor, payload: Payload) -> Tensor:
    """Channels of the last axis in the order of ``integers``."""
    return torch.cat([vectors[..., ::2], vectors[..., 1::2]], -1) if payload.data.dtype == torch.uint8 else vectors


def given_order(vectors: Tensor, payload: Payload) -> Tensor:
    """Channels of the last axis as they were, from the order of ``integers``."""
    return vectors.unflatten(-1, (2, -1)).mT.flatten(-2) if payload.data.dtype == torch.uint8 else vectors


def rounded_stretches(payload: Payload) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first entry, ``integers`` [X, m, d], scales [X, m, 1]) of a payload [R, c, M, d], stretch after stretch."""
    length, step = payload.entries, payload.stretch
    for start in range(0, length, step):
        part = payload.narrow(2, start, min(step, length - start))
        own = part.gathered() if isinstance(part, Picked) else part
        assert own.scale is not None
        yield start, integers(own).flatten(0, 1), own.scale.flatten(0, 1)
