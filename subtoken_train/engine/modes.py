"""Run a block in evaluation mode, without LoRA, with sharded weights whole or watched; switch on checkpointing.

Legend: B batch, N rows, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from subtoken_train.families.family import Family
from subtoken_train.forks import undoing
from subtoken_train.routing.bank import RouterBank


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Dropout and checkpointing off inside the block; every submodule's own mode is restored."""
    training = [part for part in module.modules() if part.training]

    def switch(mode: bool) -> None:
        for part in training:
            part.training = mode

    with undoing(partial(switch, True)):
        switch(False)
        yield


@contextmanager
def without_lora(module: nn.Module) -> Iterator[None]:
    """Every LoRA in ``module`` is left out inside the block, the one on ``o_proj`` too; nothing else changes.

    peft's own switch (``enable_adapters``) also writes ``requires_grad``: it would free the frozen LoRA of stage 2.
    """
    active = [part for part in module.modules() if isinstance(part, BaseTunerLayer) and not part.disable_adapters]

    def switch(disabled: bool) -> None:
        for part in active:
            part._disable_adapters = disabled

    with undoing(partial(switch, False)):
        switch(True)
        yield


@contextmanager
def gathered_weights(module: nn.Module) -> Iterator[None]:
    """A module's weights are whole inside the block, for callers of its parts; every process must enter."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def enable_checkpointing(family: Family, bank: RouterBank | None) -> None:
    """Non-reentrant gradient checkpointing; layers are recomputed under the routing they first ran with.

    transformers only checkpoints layers in training mode, and the frozen backbone is not: the layers' own flags are
    set here (not those of what is in them), which nothing else reads.
    """
    options = {"use_reentrant": False, **({} if bank is None else {"context_fn": bank.checkpoint_contexts})}
    family.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for layer in family.decoder.layers:
        layer.training = True


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
