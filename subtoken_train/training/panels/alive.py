"""Whether everything that should train does: gradients after the first step, movement after some."""

from __future__ import annotations

import math

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from subtoken_train.training.module import SubTokenModule
from subtoken_train.training.panels.readings import gradients_of, kind_and_layer, logs_next, norms, read_together, whole

_WATCHED = ("router", "lora_B")
_NAMED = 3


class FirstGradients(Callback):
    """Stops a run whose first optimiser step leaves a trained tensor without a finite gradient.

    Not under DeepSpeed, whose engine keeps gradients to itself. Under fp16 with loss scaling the first gradients may
    overflow, which the scaler answers by a smaller scale: there only missing ones stop the run.
    """

    def __init__(self) -> None:
        self._checked = False

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Check once.

        Raises:
            RuntimeError: a tensor has no gradient.
            ValueError: a gradient is not finite.
        """
        assert isinstance(pl_module, SubTokenModule)
        if self._checked:
            return
        self._checked = True
        gradients = gradients_of(trainer, pl_module)
        missing = [name for name, gradient in gradients.items() if gradient is None]
        if missing:
            raise RuntimeError(f"no gradient reached {_some(missing, len(gradients))}")
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return
        broken = [name for name, norm in read_together(norms(gradients)).items() if not math.isfinite(norm)]
        if broken:
            raise ValueError(
                f"the first step's gradient is not finite in {_some(broken, len(gradients))}; lower the learning rate, "
                "use precision bf16-mixed or 32-true, and check the backbone's weights"
            )


class SilentTensors(Callback):
    """Warns once where routers or LoRA's B did not move, or got no gradient but zeros, in the first steps of a run.

    Gradients are looked at on logging steps and on the last one watched. Under DeepSpeed's stage 3, where weights are
    inside the engine, nothing is watched.

    Args:
        after: optimiser steps to wait for.
    """

    def __init__(self, after: int = 20) -> None:
        self.after = after
        self._last = -1
        self._initial: dict[str, Tensor] = {}
        self._gradient: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember where everything starts."""
        self._last = trainer.global_step + self.after
        self._initial = {name: tensor.clone() for name, tensor in self._watched(pl_module).items()}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Add the gradients' norms up, on the device."""
        assert isinstance(pl_module, SubTokenModule)
        if not self._initial or not (logs_next(trainer) or trainer.global_step + 1 == self._last):
            return
        gradients = gradients_of(trainer, pl_module)
        for name, norm in norms({name: gradients[name] for name in self._initial if name in gradients}).items():
            self._gradient[name] = self._gradient.get(name, 0) + norm

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Compare, once the steps are over."""
        if not self._initial or trainer.global_step < self._last:
            return
        now = self._watched(pl_module)
        moved = read_together({name: (now[name] != start).any() for name, start in self._initial.items()})
        silent = [name for name, norm in read_together(self._gradient).items() if norm == 0]
        still = [name for name, any_moved in moved.items() if not any_moved and name not in silent]
        self._initial, self._gradient = {}, {}
        if silent or still:
            kinds = [("no gradient but zeros", silent), ("no change", still)]
            words = "; ".join(f"{what}: {_by_layer(names)}" for what, names in kinds if names)
            rank_zero_warn(
                f"some of what should train does not, after {self.after} steps. {words}. Check that the learning rate "
                "is not 0 and that labels and routed tokens reach the loss"
            )

    @staticmethod
    def _watched(module: L.LightningModule) -> dict[str, Tensor]:
        assert isinstance(module, SubTokenModule)
        return {
            name: whole(parameter.detach())
            for name, parameter in module.trained().items()
            if parameter.numel() and kind_and_layer(name)[0] in _WATCHED
        }


def _some(names: list[str], of: int) -> str:
    """How many tensors, and the first of them."""
    more = ", ..." if len(names) > _NAMED else ""
    return f"{len(names)} of {of} trained tensors: {', '.join(names[:_NAMED])}{more}"


def _by_layer(names: list[str]) -> str:
    """``router of layers 0, 3 and lora_B of layers 1``."""
    layers: dict[str, set[int]] = {}
    for kind, layer in map(kind_and_layer, names):
        layers.setdefault(kind, set()).add(layer)
    return " and ".join(f"{kind} of layers {', '.join(map(str, sorted(found)))}" for kind, found in layers.items())
