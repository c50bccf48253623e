"""A part of a model for the length of a block: in evaluation mode, or with its sharded weights whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Dropout and checkpointing off inside the block; every submodule's own mode is restored."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def gathered_weights(module: nn.Module) -> Iterator[None]:
    """A module's weights are whole inside the block, for callers of its parts; every process must enter.

    FSDP2 gathers a module's weights when the module itself is called. ZeRO-3 does so for every part, and an unsharded
    model has nothing to gather: for both the block does nothing.
    """
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()
