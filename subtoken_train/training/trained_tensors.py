"""The trained tensors of a checkpoint, read without the run that wrote it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def trained_tensors(state: Path) -> dict[str, Tensor]:
    """The tensors of a state file, in fp32 on the CPU, by their names in ``SubTokenModule.state_dict()``.

    Args:
        state: the ``state.ckpt`` of a checkpoint folder, written by one process or by DDP.
    """
    tensors: dict[str, Tensor] = torch.load(state, map_location="cpu", weights_only=True)["state_dict"]
    return {name: tensor.float() for name, tensor in tensors.items()}
