"""Callbacks that show how a run goes (``docs/watching.md`` describes every tag), and here the parts that they share.

A panel reads the device at the end of a logging step alone (``trainer.log_every_n_steps``). Panels per layer write rows
of their own: ``LightningModule.log`` visits every name in every step.
"""

import re
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from subtoken_train.training.module import SubTokenModule

_LORA = re.compile(r"\.layers\.(?P<layer>\d+)\..*\.(?P<kind>lora_[AB])\.")
_BANK = re.compile(r"\.bank\.(?P<part>selectors|gates|features|shares)\.(?P<layer>\d+)")
_PARTS = {"selectors": "router", "gates": "gate"}


def gradients_of(trainer: L.Trainer, module: SubTokenModule) -> dict[str, Tensor | None]:
    """Return gradients by name before the optimiser step, None for a tensor without; none under DeepSpeed's engine."""
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        return {}
    return {name: parameter.grad for name, parameter in module.trained().items()}


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor itself; if FSDP2 sharded it, all of it (every process must ask)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norms(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the Euclidean norms of the whole tensors that are there, fp32 scalars on the tensors' device."""
    return {name: torch.linalg.vector_norm(whole(t).float()) for name, t in tensors.items() if t is not None}


def read_together(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Read the scalars' values, in one read from the device."""
    return dict(zip(scalars, torch.stack(list(scalars.values())).tolist() if scalars else [], strict=True))


def kind_and_layer(name: str) -> tuple[str, int]:
    """Return (``router``, ``gate``, ``features``, ``shares``, ``lora_A`` or ``lora_B``, layer) of a trained tensor."""
    if found := _BANK.search(name):
        return _PARTS.get(found["part"], found["part"]), int(found["layer"])
    if found := _LORA.search(name):
        return found["kind"], int(found["layer"])
    raise ValueError(f"trained tensor {name!r} belongs to no router, gate or LoRA")


def stepped(trainer: L.Trainer, batch_idx: int) -> bool:
    """Return whether the micro-batch that just ended completed an optimiser step."""
    return trainer.is_last_batch or (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def logs_now(trainer: L.Trainer, batch_idx: int) -> bool:
    """Return whether the micro-batch that just ended completed a logging step."""
    return stepped(trainer, batch_idx) and logs_next(trainer, 0)


def logs_next(trainer: Any, ahead: int = 1) -> bool:
    """Return whether the optimiser step under way (0 ``ahead``: the last one) is a logging step."""
    step, every = int(trainer.global_step) + ahead, int(trainer.log_every_n_steps)  # Lightning's types lack it
    return every > 0 and step % every == 0


def write(trainer: L.Trainer, numbers: Mapping[str, float], steps_done: int) -> None:
    """Hand ``numbers`` by tag to every logger, in the first process only; ``steps_done`` includes their own step."""
    if numbers:
        for logger in trainer.loggers:
            logger.log_metrics({**numbers, "epoch": trainer.current_epoch}, step=steps_done - 1)
