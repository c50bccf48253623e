"""Strict reading of safetensors files: nothing missing, nothing unused, no empty tensor, no other shape, no NaN."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_DTYPES = ("F32", "F16", "BF16")


def read_shapes(path: Path) -> dict[str, list[int]]:
    """The shapes of a file's tensors, by name; only its header is read.

    Raises:
        ValueError: the file is missing or no whole safetensors file, or a tensor is no fp32, fp16 or bf16.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing: the adapter folder is incomplete")
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in list(file.keys())}
            dtypes = {name: part.get_dtype() for name, part in slices.items()}
            shapes = {name: list(part.get_shape()) for name, part in slices.items()}
    except SafetensorError as error:
        raise _broken(path, error) from error
    for name, dtype in dtypes.items():
        if dtype not in _DTYPES:
            raise ValueError(f"{path}: tensor {name[:120]} is of type {dtype}; allowed: {', '.join(_DTYPES)}")
    return shapes


def read_exactly(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of ``path``, which must hold the names and shapes of ``expected``, no more and no less.

    Returns:
        The tensors, in the dtype of ``expected``.

    Raises:
        ValueError: the file is missing, truncated, or its tensors differ or hold NaN or infinity; the message names the
            file and the first offenders.
    """
    shapes = read_shapes(path)
    missing, extra = sorted(set(expected) - set(shapes)), sorted(set(shapes) - set(expected))
    if missing or extra:
        raise ValueError(
            f"{path} does not fit this model: {len(missing)} tensors missing {_first(missing)}, "
            f"{len(extra)} not expected {_first(extra)}"
        )
    for name, shape in shapes.items():
        if 0 in shape or shape != list(expected[name].shape):
            raise ValueError(f"{path}: tensor {name} has shape {shape}, expected {list(expected[name].shape)}")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in shapes}
    except SafetensorError as error:
        raise _broken(path, error) from error
    check_finite(tensors, path)
    return {name: tensor.to(expected[name].dtype) for name, tensor in tensors.items()}


def check_finite(tensors: Mapping[str, Tensor], place: Path) -> None:
    """Raise a worded ``ValueError`` where a tensor holds NaN or infinity; ``place`` is the file or folder."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{place}: tensor {name} holds NaN or infinity; it was damaged, or its training diverged")


def _first(names: list[str]) -> list[str]:
    return [name[:80] for name in names[:2]]


def _broken(path: Path, error: SafetensorError) -> ValueError:
    return ValueError(f"{path} is not a whole safetensors file (truncated download?): {str(error)[:160]}")
