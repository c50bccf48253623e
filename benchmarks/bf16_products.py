"""Linear maps of bfloat16 numbers on processors that have no unit for them.

PyTorch's own product of bfloat16 matrices adds up in fp32 and rounds the sum. Without AMX or AVX512-BF16 it takes about
five times as long as the product of the same matrices in fp32. Here that product is taken, and its sums are rounded:
the same numbers but for the order of the sums.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def has_unit() -> bool:
    """Return whether this processor multiplies bfloat16 numbers itself."""
    return any(torch.cpu.get_capabilities().get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def products() -> AbstractContextManager[object]:
    """Return what models are run in: ``WideProducts`` where the processor has no unit for bfloat16."""
    return nullcontext() if has_unit() else WideProducts()


class WideProducts(TorchFunctionMode):
    """Within it linear maps of bfloat16 numbers are those of fp32, rounded; frozen weights are held in fp32, too."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run one operation, or its fp32 form."""
        options: Mapping[str, Any] = kwargs or {}
        if func is torch.nn.functional.linear and self._narrow(args[0]):
            rows, weight, *bias = (*args, *options.values())
            with torch.autocast("cpu", enabled=False):
                wide = [each.bfloat16().float() for each in bias if each is not None]
                return func(rows.bfloat16().float(), self._wide(weight), *wide).bfloat16()
        return func(*args, **options)

    def _narrow(self, rows: Tensor) -> bool:
        if rows.device.type != "cpu":
            return False
        if torch.is_autocast_enabled("cpu"):
            return torch.get_autocast_dtype("cpu") == torch.bfloat16
        return rows.dtype == torch.bfloat16

    def _wide(self, weight: Tensor) -> Tensor:
        if weight.requires_grad:
            return weight.bfloat16().float()
        if id(weight) not in self.held:
            self.held[id(weight)] = weight, weight.bfloat16().float()
        return self.held[id(weight)][1]
