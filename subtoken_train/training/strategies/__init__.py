"""The strategies that a recipe may name in ``trainer.strategy``; each is Lightning's own with our settings.

What one cannot do with a recipe or a machine is found before anything is loaded or written.
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import unknown_name
from subtoken_train.training.strategies.fsdp2 import Fsdp2Strategy
from subtoken_train.training.strategies.zero import ZeroStrategy, check_precision

STRATEGIES: dict[str, type[Strategy] | partial[ZeroStrategy] | str] = {
    "auto": "auto",
    "ddp": "ddp",
    "zero1": partial(ZeroStrategy, stage=1),
    "zero2": partial(ZeroStrategy, stage=2),
    "zero3": partial(ZeroStrategy, stage=3),
    "zero3_offload": partial(ZeroStrategy, stage=3, offload=True),
    "fsdp2": Fsdp2Strategy,
}
"""By name: what makes the strategy, or Lightning's own name of it.

``auto``: one device, or DDP on several. ``ddp`` is Lightning's as it comes: NCCL on GPUs, gloo on CPUs, and every
trained tensor must get a gradient in every step (``find_unused_parameters=False``), from a text-only batch too.
"""
_BARE = DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy
_DEVICES = re.compile(r"auto|-1|\d+(,\d+)*,?")


def build_strategy(name: str) -> Strategy | str:
    """The strategy of a name, as the trainer takes it.

    Raises:
        ValueError: unknown name (Lightning's other ones included), or DeepSpeed is asked for and not installed.
    """
    made = _named(name)
    return made if isinstance(made, str) else made()


def strategy_class(name: str) -> type[Strategy]:
    """The class behind a name; of ``auto`` that of several devices.

    Raises:
        ValueError: unknown name.
    """
    made = _named(name)
    if isinstance(made, str):
        return DDPStrategy
    kind = made.func if isinstance(made, partial) else made
    assert isinstance(kind, type)
    return kind


def _named(name: str) -> type[Strategy] | partial[ZeroStrategy] | str:
    if name not in STRATEGIES:
        raise unknown_name("trainer.strategy", name, STRATEGIES)
    return STRATEGIES[name]


def shares_weights(strategy: Strategy) -> bool:
    """Whether the processes of a strategy hold parts of the weights, which no process may load before the others."""
    return isinstance(strategy, Fsdp2Strategy) or (isinstance(strategy, ZeroStrategy) and strategy.zero_stage_3)


def count_devices(devices: int | str | list[int], accelerator: str, num_nodes: int) -> int:
    """Processes of a run from the trainer's settings; ``auto`` and -1 count what this machine has."""
    chosen = list(filter(None, devices.split(","))) if isinstance(devices, str) and "," in devices else devices
    if isinstance(chosen, list):
        return len(chosen) * num_nodes
    if chosen in ("auto", "-1", -1):
        return num_nodes * (1 if accelerator == "cpu" else max(1, torch.cuda.device_count()))
    return int(chosen) * num_nodes


def check_devices(devices: int | str | list[int], accelerator: str) -> None:
    """Raise a worded ``ValueError`` where a node's processes are more than its GPUs (or, on a CPU, its cores)."""
    if accelerator in ("gpu", "cuda"):
        there, name = torch.cuda.device_count(), "GPU(s)"
    elif accelerator == "cpu":
        there, name = os.cpu_count() or 1, "CPU core(s)"
    else:
        return
    if isinstance(devices, str) and not _DEVICES.fullmatch(devices):
        return  # the trainer says what is wrong with it
    wanted = count_devices(devices, accelerator, num_nodes=1)
    if wanted > there:
        raise ValueError(
            f"trainer.devices asks for {wanted} process(es), one per device, but this machine has {there} {name}; "
            "lower trainer.devices, raise trainer.accumulate_grad_batches as much, or choose trainer.accelerator"
        )


def check_cpus(devices: int | str | list[int], accelerator: str) -> None:
    """Raise a worded ``ValueError`` for devices of a CPU that are no count: it has no numbered ones."""
    if accelerator == "cpu" and devices != "auto" and (isinstance(devices, list) or not str(devices).isdecimal()):
        raise ValueError(f"trainer.devices is {devices!r}; on a CPU it is a count of processes, or auto")


def check_fit(trainer: Trainer, module: Any) -> None:
    """Raise a worded ``ValueError`` where the trainer's strategy contradicts the machine or the module's recipe."""
    strategy = trainer.strategy
    if isinstance(strategy, ZeroStrategy):
        strategy.check_accelerator()
    check_kind(type(strategy), str(strategy.precision_plugin.precision), module)


def check_kind(kind: type[Strategy], precision: str, module: Any) -> None:
    """The same from the strategy's class alone, before there is a trainer, and without looking at the machine.

    Args:
        kind: the strategy's class.
        precision: the trainer's.
        module: a ``SubTokenModule``.
    """
    if issubclass(kind, ZeroStrategy):
        check_precision(precision)
    elif issubclass(kind, _BARE) and not issubclass(kind, Fsdp2Strategy):
        raise ValueError(
            f"trainer.strategy {kind.__name__} knows nothing of frozen weights, routers and accumulation "
            f"windows; take one of {', '.join(STRATEGIES)}"
        )
    if issubclass(kind, Fsdp2Strategy) and module.gradient_checkpointing and module.routing_config is not None:
        # seen: processes reduce in different orders as soon as one has a text-only batch and another images
        raise ValueError(
            "trainer.strategy fsdp2 cannot train routers with model.gradient_checkpointing; take ddp, zero2 or zero3, "
            "or set it to false"
        )
    optimizer = module.optimizer_config.name
    if optimizer != "adamw" and issubclass(kind, ZeroStrategy | Fsdp2Strategy):
        raise ValueError(
            f"model.optimizer.name {optimizer} keeps its own states, which {kind.__name__} would share out; "
            "take adamw, or trainer.strategy ddp"
        )


def check_parts(kind: type[Strategy], parts: CompressedBackbone) -> None:
    """Raise a worded ``ValueError`` where a strategy's class cannot run a model (built or laid out).

    FSDP2 copies what it finds in a layer's arguments, so that a layer would note its routing in a copy of the split
    between context and query that no other layer sees.
    """
    if issubclass(kind, Fsdp2Strategy) and parts.splits:
        raise ValueError(
            "trainer.strategy fsdp2 cannot train a language model whose context is compressed; take ddp, zero2 or zero3"
        )
