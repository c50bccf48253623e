"""Training that ends where a score no longer improves: validation's, or that of the task answered midway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import rank_zero_info

from subtoken_train.errors import MAX_COUNT, check_range, unknown_name
from subtoken_train.training.panels.midway_scores import MidwayEvaluation

VALIDATION_SCORES = {"val/loss": "min", "val/token_accuracy": "max"}


@dataclass
class EarlyStoppingConfig:
    """When to stop early.

    Attributes:
        monitor: ``eval/accuracy`` (with an ``evaluation`` band), or ``val/loss`` or ``val/token_accuracy`` (with
            validation data).
        patience: checks without improvement after which training stops.
        mode: whether a larger (``max``) or a smaller (``min``) value is better; null: as the monitor's name says.
        min_delta: what counts as an improvement must be larger than this.
    """

    monitor: str
    patience: int = 3
    mode: Literal["min", "max"] | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_range("early_stopping.patience", self.patience, 1, MAX_COUNT)
        check_range("early_stopping.min_delta", self.min_delta, 0)

    def checked_mode(self, scores: list[str]) -> str:
        """``min`` or ``max``.

        Args:
            scores: names of the scores that the run will have.

        Raises:
            ValueError: a monitor that the run does not have, or the opposite of its mode.
        """
        if not scores:
            raise ValueError(
                f"early_stopping.monitor is {self.monitor!r}, but the run makes no scores; add an evaluation band or "
                "validation data (data.val_file, data.val)"
            )
        if self.monitor not in scores:
            raise unknown_name("early_stopping.monitor", self.monitor, scores)
        better = VALIDATION_SCORES.get(self.monitor, "max")
        if self.mode not in (None, better):
            raise ValueError(f"early_stopping.mode is {self.mode!r}, but {self.monitor} wants {better!r}; leave it out")
        return better


class StopEarly(EarlyStopping):
    """Lightning's, which checks after validation; ``eval/...`` is checked after each evaluation.

    It must stand behind ``midway`` in the list of callbacks.

    Args:
        config: checked by ``checked_mode``.
        mode: ``min`` or ``max``.
        midway: the evaluation whose score is the monitor; None for validation scores.
    """

    def __init__(self, config: EarlyStoppingConfig, mode: str, midway: MidwayEvaluation | None) -> None:
        super().__init__(
            config.monitor,
            min_delta=config.min_delta,
            patience=config.patience,
            mode=mode,
            check_on_train_epoch_end=False,  # but where the scores are made, in one epoch several times or never
        )
        self._midway = midway

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check a validation score."""
        if self._midway is None:
            super().on_validation_end(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check the score of an evaluation."""
        if self._midway is not None and self._midway.due(trainer, batch_idx):
            self._run_early_stopping_check(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say so where it stopped."""
        if self.stopping_reason_message is not None and trainer.should_stop:
            rank_zero_info(f"stopped early at step {trainer.global_step}: {self.stopping_reason_message}")
