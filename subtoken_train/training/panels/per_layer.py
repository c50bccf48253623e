"""What trains, per layer: norms of gradients and weights of routers, gates and LoRA's two factors."""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from subtoken_train.training.module import SubTokenModule
from subtoken_train.training.panels.readings import gradients_of, norms, whole
from subtoken_train.training.panels.names import by_kind_and_layer
from subtoken_train.training.panels.steps import logs_next
from subtoken_train.training.panels.write import write


class TrainedPanel(Callback):
    """Logs ``gradient_norm`` (before clipping) and ``weight_norm`` (before the step) of the logging steps.

    ``q_proj``, ``v_proj`` and ``o_proj`` of a layer are taken together, as are a router's weights and biases. Under
    DeepSpeed gradients and, in stage 3, weights are inside its engine: those norms are left out.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say what is left out."""
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            rank_zero_info("gradient_norm is not logged: DeepSpeed's engine keeps gradients to itself")

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Log, in one read from the device."""
        assert isinstance(pl_module, SubTokenModule)
        if not logs_next(trainer):
            return
        found: dict[str, Tensor] = {}
        gradients = gradients_of(trainer, pl_module)
        if gradients is not None:
            found |= _by_layer("gradient_norm", {name: grad for name, grad in gradients.items() if grad is not None})
            if found:
                found["gradient_norm/total"] = torch.linalg.vector_norm(torch.stack(list(found.values())))
        weights = {name: p.detach() for name, p in pl_module.trained().items() if p.numel()}
        found |= _by_layer("weight_norm", weights)
        numbers = torch.stack(list(found.values())).tolist() if found else []
        write(trainer, dict(zip(found, numbers, strict=True)), trainer.global_step + 1)


def _by_layer(tag: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Norms by ``tag/kind/layer_N``."""
    norm_of = dict(zip(tensors, norms([whole(tensor) for tensor in tensors.values()]), strict=True))
    return {
        f"{tag}/{kind}/layer_{layer}": torch.linalg.vector_norm(torch.stack(group))
        for (kind, layer), group in by_kind_and_layer(norm_of).items()
    }
