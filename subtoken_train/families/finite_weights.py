"""A backbone's weights are numbers: NaN or infinity in one is found when it is loaded, not in its answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def check_finite_weights(model: Any, path: str) -> None:
    """Raise a worded ``ValueError`` where a parameter of a model holds NaN or infinity, or a buffer NaN.

    One pass over each tensor where it lies, without a copy, and one read of each device. Of a quantised weight its
    scales are looked at: a NaN makes the scale of its block or row NaN.

    Args:
        model: with its weights; a tensor that is elsewhere (sharded, device meta) is passed over.
        path: of the backbone, for the message.
    """
    buffers = ((name, buffer, True) for name, buffer in model.named_buffers())
    found: dict[torch.device, list[tuple[str, Tensor]]] = defaultdict(list)
    weights = ((name, weight, False) for name, weight in model.named_parameters())
    for name, whole, may_be_infinite in chain(weights, buffers):
        for part in _numbers(whole):
            low, high = part.detach().aminmax()  # NaN where any number is
            broken = low.isnan() if may_be_infinite else ~(low.isfinite() & high.isfinite())
            found[part.device].append((name, broken))
    named = {name for of_device in found.values() for name in _marked(of_device)}
    if named:
        first = next(name for name, _ in chain(model.named_parameters(), model.named_buffers()) if name in named)
        raise ValueError(
            f"the weights of backbone {path!r} hold NaN or infinity in {len(named)} tensors, first {first}; they were "
            "damaged, or do not fit the dtype that they are loaded in: get the backbone anew, or choose a wider dtype"
        )


def _marked(flags: list[tuple[str, Tensor]]) -> list[str]:
    """Return the names whose flag is set; the flags of one device are read at once."""
    values = torch.stack([flag for _, flag in flags]).tolist()
    return [name for (name, _), value in zip(flags, values, strict=True) if value]


def _numbers(weight: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a weight: itself, or the scales of what bitsandbytes quantised."""
    state = getattr(weight, "quant_state", None)
    nested = getattr(state, "state2", None)
    scales = [getattr(state, "absmax", None), getattr(state, "offset", None), getattr(nested, "absmax", None)]
    held = [weight] if state is None else scales
    for tensor in (*held, getattr(weight, "SCB", None)):
        if isinstance(tensor, Tensor) and tensor.dtype in FLOATS and tensor.numel() and tensor.device.type != "meta":
            yield tensor
