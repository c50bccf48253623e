"""Watch what layers project to queries, keys and values: the normed states that routers and learned scorers read.

Legend: B batch, N rows, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from subtoken_train.families.family import Family
from subtoken_train.forks import undoing

InputObserver = Callable[[int, Tensor], None]
"""Called with (layer, input [B, N, D]) before a layer's attention; in chunks with all of its rows, once."""


@contextmanager
def watching_inputs(family: Family, note: InputObserver | None) -> Iterator[None]:
    """Show what the layers that run inside the block project to ``note``; None watches nothing."""
    if note is None:
        yield
        return
    hooks = list[RemovableHandle]()

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    with undoing(remove):
        for layer in range(family.shape.num_layers):
            module = family.projection(layer, "v").module  # any LoRA included, whose input is the layer's
            hooks.append(module.register_forward_pre_hook(partial(_noted, note, layer)))
        yield


def _noted(note: InputObserver, layer: int, module: nn.Module, args: tuple[Any, ...]) -> None:
    note(layer, args[0])
