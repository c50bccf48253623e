"""Losses of the answers by name: cross-entropy, divergence, or what another package brings; and distillation.

The teacher is the run's own frozen backbone, without LoRA, reducer, routing and dropout, on the same batch (Hinton,
Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", section 2).

Legend: B batch, M positions after the reducer, L labelled targets of the batch, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.modes import evaluation_mode, without_lora
from subtoken_train.errors import check_range
from subtoken_train.families.family import Family
from subtoken_train.functional.objective import answer_loss, distillation_loss, predicting_rows
from subtoken_train.reducers import build_reducer
from subtoken_train.registry import Registry
from subtoken_train.routing.bank import RoutingState
from subtoken_train.typed import own_settings
from subtoken_train.types import Batch


@dataclass(frozen=True)
class LossInput:
    """Hold what a loss is given of one micro-batch."""

    logits_LV: Tensor
    """Logits of the rows that predict a label, with gradient, in the dtype of the pass."""
    targets_L: Tensor
    """The tokens that these rows should predict, int64; L is 0 in a batch without a label."""
    rows_BM: Tensor
    """These rows in the reduced sequence, bool; ``rows_BM.nonzero()[:, 0]`` is each one's sample."""
    routing: RoutingState | None = None
    """Notes of the routers, per layer: ``choices`` holds their logits, with gradient; None without routing."""
    uncompressed_LV: Tensor | None = None

    def full_logits(self) -> Tensor:
        """Return the logits of these rows where nothing is dropped and LoRA is off, [L, V], without gradient."""
        if self.uncompressed_LV is None:
            raise ValueError("a loss that reads full_logits must declare it: reads_full_logits = True")
        return self.uncompressed_LV


@dataclass(frozen=True)
class Loss(ABC):
    """Score the answers of a micro-batch; a subclass is a frozen dataclass whose fields are its settings."""

    name: ClassVar[str]
    reads_full_logits: ClassVar[bool] = False
    """True where it calls ``LossInput.full_logits``: every step then runs the uncompressed backbone, too."""

    @abstractmethod
    def summed(self, view: LossInput) -> Tensor:
        """Return the loss *summed* over the targets, a finite scalar with gradient.

        It is divided by the targets of a whole accumulation window, over all processes: a mean here would be divided
        twice. Compute in fp32. The sum over no target is 0, still connected to the logits.
        """


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Score by the labels' cross-entropy, the default."""

    name: ClassVar[str] = "cross_entropy"

    def summed(self, view: LossInput) -> Tensor:
        return answer_loss(view.logits_LV, view.targets_L)


@dataclass(frozen=True)
class FullCache(Loss):
    """Score by the divergence from the uncompressed backbone, KL(full || compressed), at rows that predict a label."""

    name: ClassVar[str] = "full_cache"
    reads_full_logits: ClassVar[bool] = True

    def summed(self, view: LossInput) -> Tensor:
        return distillation_loss(view.logits_LV, view.full_logits(), 1.0)


LOSSES: Registry[Loss] = Registry(
    "loss",
    group="subtoken_train.losses",
    package="subtoken_train.training",
    base="loss:Loss",
    builtin={CrossEntropy.name: "loss:CrossEntropy", FullCache.name: "loss:FullCache"},
    named=True,
)


def build_loss(name: str, options: Mapping[str, Any]) -> Loss:
    """Build a loss by its name and settings; an unknown name or setting is a worded ``ValueError``."""
    found: Loss = own_settings(LOSSES.find(name), options, "model.loss_options", f"loss {name!r}")
    return found


def checked_loss(loss: Loss, view: LossInput) -> Tensor:
    """Return what a loss gives."""
    value: Any = loss.summed(view)
    if not isinstance(value, Tensor):
        problem = f"no tensor but {type(value).__name__}"
    elif value.shape:
        problem = f"a tensor of shape {list(value.shape)}"
    elif torch.is_grad_enabled() and not value.requires_grad:
        problem = "a value without gradient"
    elif not isinstance(loss, CrossEntropy) and not bool(torch.isfinite(value.detach())):
        problem = "NaN or infinity"
    else:
        return value
    raise ValueError(f"loss {loss.name!r} gave {problem}; it must give a finite scalar tensor with gradient")


@dataclass
class DistillationConfig:
    """Settings of the second term of the loss.

    Attributes:
        weight: of the divergence beside the answers' cross-entropy, which keeps weight 1; 0 only logs it.
        temperature: T; both distributions are softened by it, and the divergence is multiplied by T^2, so that its
            gradient keeps its size.
    """

    weight: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_range("distillation weight", self.weight, 0, 10**6)
        check_range("distillation temperature", self.temperature, 0.01, 1000)


class Teacher:
    """The frozen backbone of a run, uncompressed and without its LoRA."""

    def __init__(self, family: Family) -> None:
        self._backbone = CompressedBackbone(family, build_reducer("none"))

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Return the logits of rows that predict a label, [L, V] in the backbone's dtype, in the labels' order."""
        rows_BN, _ = predicting_rows(batch.labels_BN)
        model = self._backbone.model
        with evaluation_mode(model), without_lora(model):
            return self._backbone.logits(self._backbone.run(batch), rows_BN)
