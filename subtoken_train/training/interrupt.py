"""How a run ends before its last step: signals, a broken state, and the exceptions that the command line words."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
from enum import IntEnum
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from torch import Tensor, nn
from torch.nn.utils import get_total_norm


class RunStopped(BaseException):
    """A run ended before its last step. Like ``KeyboardInterrupt`` no ``Exception``: a library must not swallow it.

    Args:
        reason: what happened, for the user.
        exit_code: of the command line.
        alone: only this process stops; the others are left to whatever started them.
    """

    def __init__(self, reason: str, exit_code: int = 1, alone: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.exit_code, self.alone = reason, exit_code, alone


class TrainingInterrupted(RunStopped):
    """A signal asked for it; the exit code is the shell's 128 + number."""

    def __init__(self, number: int, when: str, alone: bool = False) -> None:
        super().__init__(f"{signal.Signals(number).name}: stopped {when}", 128 + number, alone)


class TrainingDiverged(RunStopped):
    """Loss or weights are not finite; nothing of it was saved."""


class CheckpointFailed(RunStopped):
    """A checkpoint could not be written; the ones before it are whole."""


class StopSignals:
    """Notes SIGINT, SIGTERM and, in a SLURM job, the requeue signal, until training can stop between two steps.

    Before training has started, and at the second signal, the run is left at once. Lightning's own handlers are
    replaced: at SIGTERM they start a collective inside the handler, which deadlocks where only some processes got the
    signal, and at SLURM's signal they save in the middle of a step.
    """

    def __init__(self) -> None:
        self.number = 0
        self.saving = False
        self._requeue_signal = 0
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()

    def install(self, trainer: L.Trainer) -> None:
        """Take the signals over; again, wherever Lightning may have taken them back. Only a main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        # private, but the only way to the environment that Lightning chose
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue_signal = int(environment.requeue_signal or signal.SIGUSR1)
        for number in filter(None, (signal.SIGINT, signal.SIGTERM, self._requeue_signal)):
            previous = signal.signal(number, self._note)
            self._previous.setdefault(number, previous)
        trainer._signal_connector._original_handlers.update(self._previous)  # what Lightning gives back: not ours

    def restore(self) -> None:
        """Give the signals back."""
        self.saving = False
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def requeue(self, number: int) -> str:
        """Put the SLURM job back into the queue if ``number`` asks for it; what was done, in words."""
        if not number or number != self._requeue_signal:
            return ""
        job = os.environ["SLURM_JOB_ID"]
        if "SLURM_ARRAY_JOB_ID" in os.environ:
            job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        try:
            done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
            problem = done.stderr.strip() if done.returncode else ""
        except OSError as error:
            problem = f"scontrol: {error.strerror}"
        return f"; job {job} could not be requeued ({problem})" if problem else f"; job {job} is requeued"

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker that inherited the handler: its parent decides
            return
        if self.number or not self.saving:
            raise TrainingInterrupted(number, "at once", alone=True)
        self.number = number


class Health(IntEnum):
    """What was found; the greatest of all processes counts."""

    FINE = 0
    WEIGHTS = 1
    LOSS = 2

    @property
    def reason(self) -> str:
        """What the user is told."""
        return {
            Health.FINE: "the training state is finite",
            Health.WEIGHTS: "a gradient was not finite: the trained weights are NaN or infinite",
            Health.LOSS: "the loss is NaN or infinite",
        }[self]


def weights_are_finite(module: nn.Module) -> bool:
    """Whether this process's part of the trained weights is finite.

    Looked at after an optimiser step. A NaN or infinite gradient makes AdamW's weights NaN in the same step, in every
    strategy, while gradients themselves are out of sight where DeepSpeed reduces them, and under fp16 infinite ones are
    skipped on purpose.
    """
    parts = [_local(parameter) for parameter in module.parameters() if parameter.requires_grad]
    return math.isfinite(float(get_total_norm([part for part in parts if part.numel()], math.inf)))


def _local(parameter: Any) -> Tensor:
    """The part of a parameter that this process holds (whole, ZeRO-3, FSDP2)."""
    part = getattr(parameter, "ds_tensor", parameter)
    tensor: Tensor = part.to_local() if hasattr(part, "to_local") else part
    return tensor.detach()


class LossWatch:
    """Remembers on the device whether a loss was not finite; asking is one transfer per optimiser step."""

    def __init__(self) -> None:
        self._broken: Tensor | None = None

    def note(self, loss: Tensor) -> None:
        """Look at a micro-batch's loss, a scalar."""
        broken = ~torch.isfinite(loss.detach())
        self._broken = broken if self._broken is None else self._broken | broken

    def broken(self) -> bool:
        """Whether any loss so far was NaN or infinite."""
        return self._broken is not None and bool(self._broken)
