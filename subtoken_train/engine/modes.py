"""Run a block in evaluation mode, without LoRA, with sharded weights whole or watched; switch on checkpointing.

Legend: B batch, N rows, D model width.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from subtoken_train.families.family import Family
from subtoken_train.forks import undoing
from subtoken_train.routing.bank import RouterBank


@contextmanager
def _switched(parts: list[Any], name: str, inside: bool) -> Iterator[None]:
    def switch(value: bool) -> None:
        for part in parts:
            setattr(part, name, value)

    with undoing(partial(switch, not inside)):
        switch(inside)
        yield


def evaluation_mode(module: nn.Module) -> AbstractContextManager[None]:
    """Switch dropout and checkpointing off inside the block, then restore every submodule's mode."""
    return _switched([part for part in module.modules() if part.training], "training", False)


def without_lora(module: nn.Module) -> AbstractContextManager[None]:
    """Leave every LoRA in ``module`` out inside the block; peft's own switch would also free stage 2's frozen one."""
    active = [part for part in module.modules() if isinstance(part, BaseTunerLayer) and not part.disable_adapters]
    return _switched(active, "_disable_adapters", True)


@contextmanager
def gathered_weights(module: nn.Module) -> Iterator[None]:
    """Hold a module's weights whole inside the block, for callers of its parts; every process must enter."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def enable_checkpointing(family: Family, bank: RouterBank | None) -> None:
    """Turn on non-reentrant checkpointing; layers are recomputed under the routing they first ran with."""
    options = {"use_reentrant": False, **({} if bank is None else {"context_fn": bank.checkpoint_contexts})}
    family.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for layer in family.decoder.layers:  # transformers asks a layer's own mode, and the frozen backbone is not training
        layer.training = True


InputObserver = Callable[[int, Tensor], None]
"""Called with (layer, input [B, N, D]) before a layer's attention; in chunks with all of its rows, once."""


@contextmanager
def watching_inputs(family: Family, note: InputObserver | None) -> Iterator[None]:
    """Show what the layers that run inside the block project to ``note``; None watches nothing."""
    if note is None:
        yield
        return
    hooks = ExitStack()
    with undoing(hooks.close):
        for layer in range(family.shape.num_layers):
            module = family.projection(layer, "v").module  # any LoRA included, whose input is the layer's
            hooks.callback(module.register_forward_pre_hook(lambda _, args, layer=layer: note(layer, args[0])).remove)
        yield
