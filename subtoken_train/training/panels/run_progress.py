"""Show how far a run is, on terminals and in logs, what it is, in every logger, and which records it consumed."""

import json
import sys
import time
from pathlib import Path
from textwrap import indent
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import Callback, ProgressBar, RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from subtoken_train.documents import read_text
from subtoken_train.outputs import room_for, write_whole


class BarProgress(RichProgressBar):
    """Names the last epoch only where there is one, and no version of a logger."""

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Return the modules' metrics; runs are told apart by their folders, not by ``v_num``."""
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}

    def _get_train_description(self, current_epoch: int) -> str:
        described = str(super()._get_train_description(current_epoch))
        return described.replace("/-2", "") if self.trainer.max_epochs == -1 else described


class LineProgress(ProgressBar):
    """Prints step, metrics of the progress bar and speed every ``every`` optimiser steps, from process 0."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every, self._enabled = every, True
        self._last_step, self._clock = 0, 0.0

    def enable(self) -> None:
        """Print."""
        self._enabled = True

    def disable(self) -> None:
        """Do not print."""
        self._enabled = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last_step, self._clock = trainer.global_step, time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if not self._enabled or step == self._last_step or (step % self.every and step != trainer.max_steps):
            return
        speed = (step - self._last_step) / max(time.perf_counter() - self._clock, 1e-9)
        self._last_step, self._clock = step, time.perf_counter()
        total = f"/{trainer.max_steps}" if trainer.max_steps > 0 else f" (epoch {trainer.current_epoch})"
        values = [f"{name} {value:.4g}" for name, value in trainer.progress_bar_metrics.items()]
        print("  ".join([f"step {step}{total}", *values, f"{speed:.2f} steps/s"]), flush=True)


class LogRecipe(Callback):
    """Hands the recipe to each logger as hyper-parameters, once; TensorBoard shows it as a text, ``recipe``."""

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.recipe = recipe

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Log it."""
        for logger in trainer.loggers:
            logger.log_hyperparams(self.recipe)
            if isinstance(logger, TensorBoardLogger):
                indented = indent(yaml.safe_dump(self.recipe, sort_keys=False), "    ")
                logger.experiment.add_text("recipe", indented, trainer.global_step)


class SampleLog(Callback):
    """Writes micro-batches' ids to ``logs/samples-rank<rank>.jsonl``; a resumed run drops those it will see again."""

    def __init__(self) -> None:
        self._path = Path()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        logs = Path(trainer.strategy.broadcast(trainer.default_root_dir)) / "logs"  # process 0 says where
        logs.mkdir(parents=True, exist_ok=True)
        self._path = logs / f"samples-rank{trainer.global_rank}.jsonl"
        lines = read_text(self._path, sys.maxsize).splitlines(keepends=True) if self._path.exists() else []
        write_whole(self._path, "".join(lines[: self._consumed(trainer)]))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Add a line: number of the micro-batch, optimiser steps before it, ids."""
        line = {"batch": self._consumed(trainer), "step": trainer.global_step, "ids": batch[0].record_ids}
        with room_for(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _consumed(self, trainer: L.Trainer) -> int:
        untyped: Any = trainer  # Lightning does not declare its data module
        return int(untyped.datamodule.batches_consumed())
