"""Tensors in a digest of ``hashlib``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hashlib import _Hash


def digest_tensor(digest: _Hash, name: str, tensor: Tensor) -> None:
    """Let a digest read a tensor: its name, dtype, shape and bytes, wherever it lies."""
    digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
