"""Integers of rounded payloads as products take them: unscaled, a stretch at a time.

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


class Integers:
    """Reads codes as whole numbers in fp32, always into the same memory: new pages cost more than the numbers."""

    def __init__(self, payload: Payload, vectors: int) -> None:
        """Room for so many vectors of a payload."""
        self.packed, width = payload.data.dtype == torch.uint8, payload.data.shape[-1]
        numbers = vectors * width * (2 if self.packed else 1)
        self.room = torch.empty(numbers, device=payload.data.device)
        self.bytes = torch.empty(numbers if self.packed else 0, dtype=torch.uint8, device=payload.data.device)

    def of(self, codes: Tensor) -> Tensor:
        """All of [..., width], with channels in ``stored_order``; valid until the next call."""
        if self.packed:
            half = codes.shape[-1]
            own = self.bytes[: 2 * codes.numel()].view(*codes.shape[:-1], 2 * half)
            torch.bitwise_and(codes, 15, out=own[..., :half])
            torch.bitwise_right_shift(codes, 4, out=own[..., half:])
            codes = own.view(torch.int8).sub_(8)
        return self.room[: codes.numel()].view(codes.shape).copy_(codes)


def stored_order(vectors: Tensor, payload: Payload) -> Tensor:
    """Channels of the last axis in the order of ``Integers``."""
    return torch.cat([vectors[..., ::2], vectors[..., 1::2]], -1) if payload.data.dtype == torch.uint8 else vectors


def given_order(vectors: Tensor, payload: Payload) -> Tensor:
    """Channels of the last axis as they were, from the order of ``Integers``."""
    return (
        vectors.reshape(*vectors.shape[:-1], 2, vectors.shape[-1] // 2).mT.flatten(-2)
        if payload.data.dtype == torch.uint8
        else vectors
    )


def rounded_stretches(payload: Payload) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first entry, integers [X, m, d], scales [X, m, 1]) of a payload [R, c, M, d], stretch after stretch."""
    length, step = payload.entries, min(payload.entries, payload.stretch)
    rows, heads = payload.data.shape[:2]
    integers = Integers(payload, rows * heads * step)
    for start in range(0, length, step):
        part = payload.narrow(2, start, min(step, length - start))
        own = part.gathered() if isinstance(part, Picked) else part
        assert own.scale is not None
        yield start, integers.of(own.data).flatten(0, 1), own.scale.flatten(0, 1)
