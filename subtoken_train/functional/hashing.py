"""Hashes: pseudo-random numbers from integer keys, and tensors in a digest.

Random controls hash (seed, sample, layer, position, group): the same numbers in any batch, and when a layer runs again.
"""

import hashlib
import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Odd 64-bit constants of the splitmix64 finaliser, as signed integers; int64 products wrap.
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)
_STEP = -7046029254386353131


def uniform_hash(*keys: Tensor | int) -> Tensor:
    """Hash broadcastable int64 keys (at least one a tensor) to uniform numbers in [0, 1), float32."""
    device = next(key.device for key in keys if isinstance(key, Tensor))
    state = torch.full((), _STEP, device=device)  # not 0, which the mixing below would leave at 0 for keys of 0
    for key in keys:
        state = state.to(key.device) if isinstance(key, Tensor) else state
        mixed = (state + key) * _STEP
        for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
            mixed = (mixed ^ (mixed >> shift)) * multiplier
        state = mixed ^ (mixed >> 31)
    return (state & 0xFFFFFF).float() / float(1 << 24)


def sample_seeds(record_ids: Sequence[str], device: torch.device) -> Tensor:
    """Derive one int64 key per sample, [B], from the records' own names."""
    return torch.tensor([zlib.crc32(name.encode()) for name in record_ids], dtype=torch.int64, device=device)


def digest_of(text: str, tensors: Iterable[tuple[str, Tensor]]) -> "hashlib._Hash":
    """Make a SHA-256 of a text and of named tensors, in their order: of each name, dtype, shape and bytes."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in tensors:
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest
