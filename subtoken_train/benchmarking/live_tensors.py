"""Bytes of all live tensors, followed through every operation: what a training step really holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveTensors(TorchDispatchMode):
    """Counts storages, once each, from the operation that makes them until nothing refers to them.

    Sees forward, backward and optimiser (one thread: a CPU). Does not see what a kernel allocates and frees inside.

    Args:
        held: tensors that were there before.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        TorchDispatchMode.__init__(self)
        self.live = self.peak = 0
        self._known = WeakIdKeyDictionary()
        for tensor in held:
            self._follow(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, count what it made."""
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        return made

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        self._known[storage] = weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.live -= size


def tensors_of(module: torch.nn.Module) -> list[Tensor]:
    """Parameters and buffers, and what bitsandbytes keeps beside a quantised weight."""
    found = [*module.parameters(), *module.buffers()]
    for parameter in module.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            nested = state.state2
            found += [state.absmax, state.code, state.offset, nested.absmax, nested.code]
        found += [scales for scales in (getattr(parameter, "SCB", None),) if scales is not None]
    return found
