"""The trained tensors of a checkpoint, read without the run that wrote it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def trained_tensors(state: Path) -> dict[str, Tensor]:
    """The tensors of a state file, in fp32 on the CPU, by their names in ``SubTokenModule.state_dict()``.

    Args:
        state: the ``state.ckpt`` of a checkpoint folder, written by one process or by DDP.

    Raises:
        ValueError: the file cannot be read.
    """
    tensors: dict[str, Tensor] = _content(state)["state_dict"]
    return {name: tensor.float() for name, tensor in tensors.items()}


def noted(state: Path, key: str) -> Any:
    """What ``SubTokenModule.on_save_checkpoint`` put under ``key`` into a state file; None where it put nothing."""
    return _content(state).get(key)


def _content(state: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(state, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{state} cannot be read as a checkpoint: {type(error).__name__} {error}") from error
    return content
