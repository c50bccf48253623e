"""Layers of a run: norms of what trains, whether all of it moves, and which groups the routers keep.

Legend: B batch, N positions, S value groups.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from subtoken_train.functional.masks import choice_entropy, group_usage, mask_entropy, usage_entropy
from subtoken_train.training import panels
from subtoken_train.training.module import SubTokenModule
from subtoken_train.types import grouped


class SilentTensors(Callback):
    """Warns once where routers or LoRA's B did not move, or got no gradient but zeros, in the first ``after`` steps."""

    def __init__(self, after: int = 20) -> None:
        self.after, self._last = after, -1
        self._initial: dict[str, Tensor] = {}
        self._gradient: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Remember where everything starts."""
        self._last = trainer.global_step + self.after
        self._initial = {name: tensor.clone() for name, tensor in self._watched(pl_module).items()}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Read gradients between accumulation and clipping."""
        if not self._initial or not (panels.logs_next(trainer) or trainer.global_step + 1 == self._last):
            return
        gradients = panels.gradients_of(trainer, pl_module)
        for name, norm in panels.norms({name: gradients[name] for name in self._initial if name in gradients}).items():
            self._gradient[name] = self._gradient.get(name, 0) + norm

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._initial or trainer.global_step < self._last:
            return
        now = self._watched(pl_module)
        moved = panels.read_together({name: (now[name] != start).any() for name, start in self._initial.items()})
        silent = [name for name, norm in panels.read_together(self._gradient).items() if norm == 0]
        still = [name for name, any_moved in moved.items() if not any_moved and name not in silent]
        self._initial, self._gradient = {}, {}
        if silent or still:
            kinds = [("no gradient but zeros", silent), ("no change", still)]
            words = "; ".join(f"{what}: {_layers_of(names)}" for what, names in kinds if names)
            check = "Check that the learning rate is not 0 and that labels and routed tokens reach the loss"
            rank_zero_warn(f"some of what should train does not, after {self.after} steps. {words}. {check}")

    @staticmethod
    def _watched(module: L.LightningModule) -> dict[str, Tensor]:
        assert isinstance(module, SubTokenModule)
        here = {name: each.detach() for name, each in module.trained().items() if each.numel()}
        watched = (name for name in here if panels.kind_and_layer(name)[0] in ("router", "lora_B"))
        return {name: panels.whole(here[name]) for name in watched}


def _layers_of(names: list[str]) -> str:
    layers = grouped(map(panels.kind_and_layer, names))
    return " and ".join(f"{kind} of layers {', '.join(map(str, sorted({*found})))}" for kind, found in layers.items())


class TrainedPanel(Callback):
    """Logs ``gradient_norm`` (before clipping) and ``weight_norm`` of each layer in logging steps; not DeepSpeed's."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            rank_zero_info("gradient_norm is not logged: DeepSpeed's engine keeps gradients to itself")

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        if not panels.logs_next(trainer):
            return
        if found := _by_layer("gradient_norm", panels.gradients_of(trainer, pl_module)):
            found["gradient_norm/total"] = torch.linalg.vector_norm(torch.stack(list(found.values())))
        found |= _by_layer("weight_norm", {name: p.detach() for name, p in pl_module.trained().items() if p.numel()})
        panels.write(trainer, panels.read_together(found), trainer.global_step + 1)


def _by_layer(tag: str, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    groups = grouped((panels.kind_and_layer(name), norm) for name, norm in panels.norms(tensors).items())
    whole = {place: torch.linalg.vector_norm(torch.stack(own)) for place, own in groups.items()}
    return {f"{tag}/{kind}/layer_{layer}": norm for (kind, layer), norm in whole.items()}


class RoutingPanel(Callback):
    """Logs group usage, mask and router entropy per layer, of the last micro-batch of a logging step."""

    def __init__(self) -> None:
        self._logits: dict[int, Tensor] = {}
        self._hooks = ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        bank = pl_module.parts.bank
        if bank is not None and bank.learned and panels.logs_next(trainer):
            for layer, selector in enumerate(bank.selectors):
                self._hooks.callback(selector.register_forward_hook(partial(self._note, layer)).remove)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._hooks.close()
        if panels.logs_now(trainer, batch_idx):
            panels.write(trainer, self._statistics(pl_module), trainer.global_step)
        self._logits = {}

    def _note(self, layer: int, router: nn.Module, args: Any, logits_BNS: Tensor) -> None:
        self._logits[layer] = logits_BNS.detach()

    def _statistics(self, module: SubTokenModule) -> dict[str, float]:
        record = module.last_step
        if record is None or record.state is None or not bool(record.state.routed_BN.any()):
            return {}
        found: dict[str, Tensor] = {}
        usages: dict[int, Tensor] = {}
        for layer, mask_BNS in record.state.masks.items():
            routed_BN = record.routed(layer)
            usages[layer] = group_usage(mask_BNS, routed_BN)
            found[f"mask_entropy/layer_{layer}"] = mask_entropy(mask_BNS, routed_BN)
            if layer in self._logits:
                logits_BNS = self._logits[layer][..., : mask_BNS.shape[-1]]  # of keys under a byte budget, behind
                found[f"router_entropy/layer_{layer}"] = choice_entropy(logits_BNS, routed_BN)
        numbers = panels.read_together(found)
        for layer, usage_S in zip(usages, torch.stack(list(usages.values())).cpu(), strict=True):
            numbers[f"group_usage_entropy/layer_{layer}"] = usage_entropy(usage_S)
            numbers[f"group_usage_max/layer_{layer}"] = float(usage_S.max())
        return numbers
