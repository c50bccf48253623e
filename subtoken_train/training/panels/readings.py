"""Gradients of the trained tensors, whatever the strategy."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor

from subtoken_train.training.module import SubTokenModule


def gradients_of(trainer: L.Trainer, module: SubTokenModule) -> dict[str, Tensor | None] | None:
    """Gradients by name as they stand before the optimiser step, None where a tensor got none.

    None for all of them under DeepSpeed, whose engine keeps them to itself.
    """
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        return None
    return {name: parameter.grad for name, parameter in module.trained().items()}


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself; of a tensor sharded by FSDP2, all of it (every process must ask)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Euclidean norms, fp32 scalars on the tensors' device."""
    return [torch.linalg.vector_norm(tensor.float()) for tensor in tensors]
