"""How a run ends before its last step: signals, and the exceptions that the command line words."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from types import FrameType
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment


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
