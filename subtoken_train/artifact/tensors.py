"""Strict reading of safetensors files: nothing missing, nothing unused, no empty tensor, no other shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor


def read_exactly(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of ``path``, which must hold the names and shapes of ``expected``, no more and no less.

    Raises:
        ValueError: the file is missing, truncated, or its tensors differ; the message names the file and the first
            offenders.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: the adapter folder is incomplete")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file (truncated download?): {error}") from error
    missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or extra:
        raise ValueError(
            f"{path} does not fit this model: {len(missing)} tensors missing {missing[:2]}, "
            f"{len(extra)} not expected {extra[:2]}"
        )
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or tensor.shape != expected[name].shape:
            raise ValueError(
                f"{path}: tensor {name} has shape {list(tensor.shape)}, expected {list(expected[name].shape)}"
            )
    return tensors
