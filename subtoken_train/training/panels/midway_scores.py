"""Scores in the middle of training: a small task, answered by the model as it is; and stopping where none improves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.modes import evaluation_mode
from subtoken_train.errors import MAX_COUNT, MAX_TOKENS, check_range, check_word
from subtoken_train.training.panels import stepped, write
from subtoken_train.training.panels.throughput import Stopwatch

Evaluate = Callable[[CompressedBackbone], dict[str, float]]
"""Scores in 0..1 by name (``accuracy``, and one per kind of question) of a backbone in evaluation mode."""


@dataclass
class EvaluationConfig:
    """A small task to answer while training: questions with answers, of which the last turn of each is asked.

    Attributes:
        data: in LLaVA's instruction format.
        limit: only the first questions; None: all.
        image_folder: where image paths start; None: the data file's own folder.
        images_outside_folder: whether image paths may lead out of it.
        max_length: prompt tokens, visual ones included.
    """

    data: str
    every_n_steps: int = 500
    limit: int | None = 200
    image_folder: str | None = None
    images_outside_folder: bool = False
    batch_size: int = 32
    max_length: int = 2048
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "limit", "batch_size"):
            check_range(f"evaluation.{name}", getattr(self, name), 1, MAX_COUNT)
        for name in ("max_length", "max_new_tokens"):
            check_range(f"evaluation.{name}", getattr(self, name), 1, MAX_TOKENS)


class MidwayEvaluation(Callback):
    """Logs ``eval/NAME`` every so many optimiser steps, in every process alike; training then goes on as if unasked."""

    def __init__(self, evaluate: Evaluate, every_n_steps: int, watch: Stopwatch) -> None:
        self.evaluate, self.every_n_steps, self.watch = evaluate, every_n_steps, watch

    def due(self, trainer: L.Trainer, batch_idx: int) -> bool:
        """Return whether the micro-batch that just ended is followed by an evaluation."""
        return stepped(trainer, batch_idx) and trainer.global_step % self.every_n_steps == 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self.due(trainer, batch_idx):
            return
        parts, decoder = pl_module.parts, pl_module.parts.family.decoder.config
        attention = decoder._attn_implementation
        with self.watch.pause(), isolate_rng(), evaluation_mode(parts):
            scores = self.evaluate(parts)
        decoder._attn_implementation = attention  # generating may have wrapped it
        found = {f"eval/{name}": score for name, score in scores.items()}
        for name, score in found.items():
            pl_module.log(name, score, logger=False, prog_bar=name == "eval/accuracy")
        write(trainer, found, trainer.global_step)  # now: Lightning itself would wait for the next logging step


VALIDATION_SCORES = {"val/loss": "min", "val/token_accuracy": "max"}


@dataclass
class EarlyStoppingConfig:
    """When to stop early.

    Attributes:
        monitor: ``eval/accuracy`` (with an ``evaluation`` band), or ``val/loss`` or ``val/token_accuracy`` (with data).
        patience: checks without improvement after which training stops.
        min_delta: what counts as an improvement must be larger than this.
    """

    monitor: str
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_range("early_stopping.patience", self.patience, 1, MAX_COUNT)
        check_range("early_stopping.min_delta", self.min_delta, 0)

    def checked_mode(self, scores: list[str]) -> str:
        """Return which is better, ``min`` or ``max``; ``scores`` names those that the run will have."""
        if not scores:
            missing = "but the run makes no scores; add an evaluation band or validation data (data.val_file, data.val)"
            raise ValueError(f"early_stopping.monitor is {self.monitor!r}, {missing}")
        check_word("early_stopping.monitor", self.monitor, scores)
        return VALIDATION_SCORES.get(self.monitor, "max")


class StopEarly(EarlyStopping):
    """Lightning's; ``eval/...`` is checked after each evaluation: it must stand behind ``midway`` in the list."""

    def __init__(self, config: EarlyStoppingConfig, mode: str, midway: MidwayEvaluation | None) -> None:
        # checked where the scores are made, in one epoch several times or never
        super().__init__(config.monitor, config.min_delta, config.patience, mode=mode, check_on_train_epoch_end=False)
        self._midway = midway

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._midway is None:
            super().on_validation_end(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._midway is not None and self._midway.due(trainer, batch_idx):
            self._run_early_stopping_check(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.stopping_reason_message is not None and trainer.should_stop:
            rank_zero_info(f"stopped early at step {trainer.global_step}: {self.stopping_reason_message}")
