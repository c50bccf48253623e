"""The callback that guards a run at the end of every optimiser step: finite? asked to stop? time to save?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from subtoken_train.errors import MAX_COUNT, check_range
from subtoken_train.training.checkpoint_writing import write_checkpoint
from subtoken_train.training.finiteness import FAULTS, LossWatch
from subtoken_train.training.interrupt import StopSignals, TrainingDiverged, TrainingInterrupted


class RunCheckpoints(Checkpoint):
    """Saves whole checkpoints, every so often, at the end, and before a signal stops the run; never a broken state.

    Everything happens right after an optimiser step, the only moment that resumes exactly: the gradients of a
    half-accumulated window are in no checkpoint. So a stop that falls inside a window (a signal, ``max_time``, early
    stopping) waits for its end. All processes decide alike: a signal may have reached only one of them.

    Args:
        folder: where the checkpoints go.
        every_n_train_steps: optimiser steps between two checkpoints.
        keep_last: whole checkpoints that stay; an older one goes once a newer one is whole.

    Attributes:
        on_whole: what process 0 calls whenever a checkpoint stands, before older ones go.

    Raises:
        ValueError: a count below 1.
    """

    def __init__(self, folder: str = "checkpoints", every_n_train_steps: int = 500, keep_last: int = 2) -> None:
        for name, value in (("every_n_train_steps", every_n_train_steps), ("keep_last", keep_last)):
            check_range(f"checkpoint.{name}", value, 1, MAX_COUNT)
        self.folder, self.every, self.keep_last = Path(folder), every_n_train_steps, keep_last
        self.on_whole: Callable[[], object] = lambda: None
        self._signals, self._losses = StopSignals(), LossWatch()
        self._step_before = self._saved_step = 0
        self._inside_window = self._stop_held = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Take over the signals: until training starts, they end the run at once. Process 0 says where to write."""
        if stage == "fit":
            self.folder = trainer.strategy.broadcast(self.folder)
            self._signals, self._losses = StopSignals(), LossWatch()
            self._signals.install(trainer)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lightning has just registered its own handlers."""
        self._signals.install(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """From here on a signal waits for the end of its step."""
        self._signals.install(trainer)
        self._signals.saving = True
        self._saved_step = trainer.global_step  # resumed from there, or nothing to save yet
        self._inside_window = self._stop_held = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the step, to see whether this micro-batch completes one."""
        self._step_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After an optimiser step: refuse a broken state, save where it is due, leave if asked to.

        Raises:
            TrainingDiverged: loss or weights are not finite.
            CheckpointFailed: the disk is full.
            TrainingInterrupted: a signal came; the checkpoint is written.
        """
        self._losses.note(outputs["loss"])
        self._inside_window = trainer.global_step == self._step_before
        self._hold_stop(trainer)
        if self._inside_window:
            return
        fault, number = _greatest(trainer, self._losses.fault(pl_module), self._signals.number)
        if fault:
            raise TrainingDiverged(f"{FAULTS[fault]} after step {trainer.global_step}; it was not saved")
        if number or trainer.global_step % self.every == 0 or _is_last(trainer):
            self.save(trainer)
        self._leave(trainer, number)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save before it, so that a signal need not wait for the end of a long validation."""
        if self._between_steps():
            self.save(trainer)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Leave if asked to.

        Raises:
            TrainingInterrupted: a signal came.
        """
        if self._between_steps():
            self._leave(trainer, _greatest(trainer, self._signals.number)[0])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Early stopping may have asked for a stop inside an accumulation window."""
        if self._signals.saving:
            self._hold_stop(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save what a stop after validation left unsaved."""
        if self._between_steps():
            self.save(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Give the signals back; Lightning skips ``teardown`` then."""
        self._signals.restore()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the signals back."""
        self._signals.restore()

    def save(self, trainer: L.Trainer) -> None:
        """Write the checkpoint of this step, unless it is there; all processes call it.

        Raises:
            CheckpointFailed: see ``write_checkpoint``.
        """
        if trainer.global_step != self._saved_step:
            write_checkpoint(trainer, self.folder, self.keep_last, self.on_whole)
            self._saved_step = trainer.global_step

    def _leave(self, trainer: L.Trainer, number: int) -> None:
        """Stop, here in all processes, if they agreed on a signal."""
        if number:
            requeued = self._signals.requeue(number) if trainer.is_global_zero else ""
            raise TrainingInterrupted(number, f"after step {trainer.global_step}{requeued}")

    def _between_steps(self) -> bool:
        """Whether training has begun and no window is half-accumulated: what is saved now resumes exactly."""
        return self._signals.saving and not self._inside_window

    def _hold_stop(self, trainer: L.Trainer) -> None:
        """Put off a stop that was asked for inside an accumulation window; its gradients would be lost."""
        if trainer.should_stop and self._inside_window:
            self._stop_held, trainer.should_stop = True, False
        elif self._stop_held and not self._inside_window:
            self._stop_held, trainer.should_stop = False, True


def _greatest(trainer: L.Trainer, *numbers: int) -> list[int]:
    """Each number's greatest value among the processes."""
    if trainer.world_size == 1:
        return list(numbers)
    mine = torch.tensor(numbers, device=trainer.strategy.root_device)
    agreed: Tensor = trainer.strategy.reduce(mine, reduce_op="max")
    return [int(number) for number in agreed.tolist()]


def _is_last(trainer: L.Trainer) -> bool:
    """Whether training ends with this step."""
    last_epoch = trainer.current_epoch + 1 == trainer.max_epochs
    stops = trainer.should_stop and trainer.fit_loop._can_stop_early  # not before min_steps
    return stops or trainer.global_step == trainer.max_steps or (last_epoch and trainer.is_last_batch)
