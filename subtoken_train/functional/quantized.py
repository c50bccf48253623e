"""Weights that bitsandbytes holds in 4 or 8 bits, as the matrices that they stand for. Legend: O output width."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from subtoken_train.types import Quantization

_NF4_BLOCK, _NESTED_BLOCK = 64, 256
_NF4_TABLES = 4 * (16 + 256 + 1)  # bytes of a weight's two code books and of its offset, fp32


def dense_shape(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of the matrix that a weight holds; a 4-bit weight's own is that of its packed bytes."""
    state = getattr(weight, "quant_state", None)
    return tuple(weight.shape if state is None else state.shape)


def is_readable(linear: nn.Module) -> bool:
    """Return whether ``dense_weight`` can read a linear layer: floating point, or quantised by bitsandbytes."""
    weight: Any = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor):
        return False
    quantised = getattr(weight, "quant_state", None) is not None or _row_scales(linear) is not None
    return quantised or weight.dtype.is_floating_point


def dense_weight(linear: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return a readable linear layer's weight in ``dtype``; dequantised (a new tensor) where it is quantised."""
    weight: Any = linear.weight
    if getattr(weight, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit

        dense: Tensor = dequantize_4bit(weight.data, weight.quant_state)
        return dense.to(dtype)
    scales_O = _row_scales(linear)
    held: Tensor = weight.data.to(dtype)
    return held if scales_O is None else held.mul_(scales_O[:, None] / 127)


def _row_scales(linear: nn.Module) -> Tensor | None:
    """The scales of an 8-bit weight's rows, [O] in fp32; the first pass moves them from the weight into the layer."""
    found = (getattr(getattr(linear, holder, None), "SCB", None) for holder in ("weight", "state"))
    return next((scales_O for scales_O in found if scales_O is not None), None)


def quantised_bytes(shape: tuple[int, ...], kind: Quantization) -> int:
    """Return a (rows, columns) weight's bytes in 4 or 8 bits, scales included; NF4 with double quantisation."""
    rows, columns = shape
    if kind == "int8":
        return rows * columns + 4 * rows
    assert kind == "nf4"
    blocks = math.ceil(rows * columns / _NF4_BLOCK)
    return math.ceil(rows * columns / 2) + blocks + 4 * math.ceil(blocks / _NESTED_BLOCK) + _NF4_TABLES
