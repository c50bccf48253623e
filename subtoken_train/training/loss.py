"""Losses of the answers by name: cross-entropy, or what another installed package brings as an entry point.

A recipe names one by ``model.loss`` and gives its settings by ``model.loss_options``. The routers' balance loss and
distillation are added to it, whatever it is, and ``val/loss`` stays cross-entropy, so that runs can be compared.

Legend: B batch, M positions after the reducer, L labelled targets of the batch, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from subtoken_train.functional.objective import answer_loss
from subtoken_train.registry import Registry
from subtoken_train.routing.state import RoutingState
from subtoken_train.typed import own_settings


@dataclass(frozen=True)
class LossInput:
    """Hold what a loss is given of one micro-batch.

    Attributes:
        logits_LV: of the rows that predict a label, with gradient, in the dtype of the pass.
        targets_L: the tokens that these rows should predict, int64; L is 0 in a batch without a label.
        rows_BM: which rows of the reduced sequence they are, bool; ``rows_BM.nonzero()[:, 0]`` is each one's sample.
        routing: what the routers did, per layer: ``choices`` holds their logits, with gradient; None without routing.
    """

    logits_LV: Tensor
    targets_L: Tensor
    rows_BM: Tensor
    routing: RoutingState | None = None
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
        """Return ``answer_loss``."""
        return answer_loss(view.logits_LV, view.targets_L)


LOSSES: Registry[Loss] = Registry(
    "loss",
    group="subtoken_train.losses",
    package="subtoken_train.training",
    base="loss:Loss",
    builtin={CrossEntropy.name: "loss:CrossEntropy"},
    named=True,
)


def build_loss(name: str, options: Mapping[str, Any]) -> Loss:
    """Build a loss by its name and settings; an unknown name or setting is a worded ``ValueError``."""
    found: Loss = own_settings(LOSSES.find(name), options, "model.loss_options", f"loss {name!r}")
    return found


def checked_loss(loss: Loss, view: LossInput) -> Tensor:
    """Return what a loss gives."""
    value: Any = loss.summed(view)
    problem = ""
    if not isinstance(value, Tensor):
        problem = f"no tensor but {type(value).__name__}"
    elif value.shape:
        problem = f"a tensor of shape {list(value.shape)}"
    elif torch.is_grad_enabled() and not value.requires_grad:
        problem = "a value without gradient"
    elif not isinstance(loss, CrossEntropy) and not bool(torch.isfinite(value.detach())):
        problem = "NaN or infinity"
    if problem or not isinstance(value, Tensor):
        raise ValueError(
            f"loss {loss.name!r} gave {problem}; it must give the sum over the targets: a finite scalar tensor with "
            "gradient"
        )
    return value
