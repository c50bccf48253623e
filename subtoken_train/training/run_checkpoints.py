"""The callback that guards a run at the end of every optimiser step, with its signals, checks and checkpoints."""

import math
import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from subtoken_train.errors import MAX_COUNT, check_range
from subtoken_train.training import checkpoints
from subtoken_train.training.trained_tensors import trained_shapes


class RunStopped(BaseException):
    """A run ended early (``alone``: in this process). No ``Exception``: a library must not swallow it."""

    def __init__(self, reason: str, exit_code: int = 1, alone: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.exit_code, self.alone = reason, exit_code, alone


def interrupted(number: int, when: str, alone: bool = False) -> RunStopped:
    """Return the end that a signal asks for; the exit code is the shell's 128 + number."""
    return RunStopped(f"{signal.Signals(number).name}: stopped {when}", 128 + number, alone)


class StopSignals:
    """Notes SIGINT, SIGTERM and, in a SLURM job, the requeue signal, until training can stop between two steps.

    Before training, and at the second signal, the run is left at once. Lightning's own handlers may deadlock.
    """

    def __init__(self) -> None:
        self.number, self.saving = 0, False
        self._previous: dict[int, Any] = {}
        self._requeue_signal, self._process = 0, os.getpid()

    def install(self, trainer: L.Trainer) -> None:
        """Take the signals over; again, wherever Lightning may have taken them back. Only a main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        # private, but the only way to the environment that Lightning chose
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue_signal = int(environment.requeue_signal or signal.SIGUSR1)
        for number in filter(None, (signal.SIGINT, signal.SIGTERM, self._requeue_signal)):
            self._previous.setdefault(number, signal.signal(number, self._note))
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
            raise interrupted(number, "at once", alone=True)
        self.number = number


FAULTS = ("", "a gradient was not finite: the trained weights are NaN or infinite", "the loss is NaN or infinite")


def weights_are_finite(module: nn.Module) -> bool:
    """Return whether this process's trained weights are finite: a NaN gradient makes AdamW's NaN in the same step."""
    parts = [getattr(each, "ds_tensor", each) for each in module.parameters() if each.requires_grad]
    local = [part.to_local() if hasattr(part, "to_local") else part for part in parts]
    return math.isfinite(float(get_total_norm([part.detach() for part in local if part.numel()], math.inf)))


class RandomState(Callback):
    """Saves Python's, NumPy's and torch's generators of all processes, and restores each at its next batch."""

    def __init__(self) -> None:
        self._resumed: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  # libraries draw from it
        own = {  # in types that ``torch.load(weights_only=True)`` reads
            "python": random.getstate(),
            "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, gauss),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        }
        states = [own] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(states, own)
        checkpoint["random_state"] = states

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keep this process's state until the first batch: loading data and sanity checks draw numbers too."""
        states = checkpoint["random_state"]
        if len(states) != trainer.world_size:
            written = f"the checkpoint was written by {len(states)} process(es), this run has {trainer.world_size}"
            rank_zero_warn(f"{written}: dropout will not be what it would have been")
        self._resumed = states[trainer.global_rank % len(states)]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self._resumed:
            return
        state, self._resumed = self._resumed, {}
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


def write_checkpoint(trainer: L.Trainer, folder: Path, keep_last: int) -> None:
    """Write the step's checkpoint, by all processes: whole, or an error of all."""
    step, strategy = trainer.global_step, trainer.strategy
    partial = folder / f"step-{step}{checkpoints.PARTIAL}"
    _on_first(trainer, folder, lambda: checkpoints.begin(folder, step))
    failure: OSError | None = None
    try:
        trainer.save_checkpoint(partial / checkpoints.STATE, weights_only=False)
    except OSError as error:
        if (partial / checkpoints.STATE).is_dir():  # every process writes shards, with barriers in between
            raise  # and the launcher ends the others
        failure = error
        strategy.barrier()  # the other processes wait here, at the end of save_checkpoint
    shapes = trained_shapes(trainer.lightning_module)
    marker = checkpoints.Marker(step, trainer.world_size, type(strategy).__name__, shapes)

    def finish() -> None:
        if failure is not None:
            raise failure
        checkpoints.seal(partial, marker)
        checkpoints.keep_newest(folder, keep_last)

    _on_first(trainer, folder, finish)


def _on_first(trainer: L.Trainer, folder: Path, action: Callable[[], object]) -> None:
    failure: OSError | None = None
    if trainer.is_global_zero:
        try:
            action()
        except OSError as error:
            failure = error
            partial = folder / f"step-{trainer.global_step}{checkpoints.PARTIAL}"
            shutil.rmtree(partial, ignore_errors=True)  # it may be what fills the disk
    failure = trainer.strategy.broadcast(failure)
    if failure is not None:
        where = f"the checkpoint of step {trainer.global_step} could not be written to {folder}"
        raise RunStopped(f"{where}: {failure.strerror or failure}") from failure


class RunCheckpoints(Checkpoint):
    """Saves whole checkpoints, every so often, at the end, and before a signal stops the run; never a broken state.

    Right after an optimiser step alone, which resumes exactly. All processes decide alike.
    """

    def __init__(self, folder: str = "checkpoints", every_n_train_steps: int = 500, keep_last: int = 2) -> None:
        for name, value in (("every_n_train_steps", every_n_train_steps), ("keep_last", keep_last)):
            check_range(f"checkpoint.{name}", value, 1, MAX_COUNT)
        self.folder, self.every, self.keep_last = Path(folder), every_n_train_steps, keep_last
        self._signals, self._broken = StopSignals(), torch.zeros((), dtype=torch.bool)
        self._step_before = self._saved_step = 0
        self._inside_window = self._stop_held = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take over the signals: until training starts, they end the run at once."""
        if stage == "fit":
            self._signals, self._broken = StopSignals(), torch.zeros((), dtype=torch.bool)
            self._signals.install(trainer)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the signals over: Lightning has just registered its own handlers."""
        self._signals.install(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._signals.install(trainer)
        self._signals.saving = True
        self._saved_step = trainer.global_step  # resumed from there, or nothing to save yet
        self._inside_window = self._stop_held = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._step_before = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Refuse a broken state after an optimiser step, save if due, leave if asked to."""
        loss = outputs["loss"].detach()  # the device is asked once an optimiser step
        self._broken = self._broken.to(loss.device) | ~torch.isfinite(loss)
        self._inside_window = trainer.global_step == self._step_before
        self._hold_stop(trainer)
        if self._inside_window:
            return
        fault = 2 if bool(self._broken) else int(not weights_are_finite(pl_module))
        fault, number = _greatest(trainer, fault, self._signals.number)
        if fault:
            raise RunStopped(f"{FAULTS[fault]} after step {trainer.global_step}; it was not saved")
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early  # not before min_steps
        last = trainer.current_epoch + 1 == trainer.max_epochs and trainer.is_last_batch
        if number or stops or last or trainer.global_step == trainer.max_steps or trainer.global_step % self.every == 0:
            self.save(trainer)
        self._leave(trainer, number)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Save before it, so that a signal need not wait for the end of a long validation."""
        if self._signals.saving and not self._inside_window:
            self.save(trainer)

    on_train_end = on_validation_start

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Leave if asked to."""
        if self._signals.saving and not self._inside_window:
            self._leave(trainer, _greatest(trainer, self._signals.number)[0])

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Obey early stopping, which may have asked for a stop inside an accumulation window."""
        if self._signals.saving:
            self._hold_stop(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the signals back; Lightning skips ``teardown`` then."""
        self._signals.restore()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._signals.restore()

    def save(self, trainer: L.Trainer) -> None:
        """Write the checkpoint of this step, unless it is there; all processes call it."""
        if trainer.global_step != self._saved_step:
            write_checkpoint(trainer, self.folder, self.keep_last)
            self._saved_step = trainer.global_step

    def _leave(self, trainer: L.Trainer, number: int) -> None:
        if number:
            requeued = self._signals.requeue(number) if trainer.is_global_zero else ""
            raise interrupted(number, f"after step {trainer.global_step}{requeued}")

    def _hold_stop(self, trainer: L.Trainer) -> None:
        if trainer.should_stop and self._inside_window:
            self._stop_held, trainer.should_stop = True, False
        elif self._stop_held and not self._inside_window:
            self._stop_held, trainer.should_stop = False, True


def _greatest(trainer: L.Trainer, *numbers: int) -> list[int]:
    if trainer.world_size == 1:
        return list(numbers)
    mine = torch.tensor(numbers, device=trainer.strategy.root_device)
    agreed: Tensor = trainer.strategy.reduce(mine, reduce_op="max")
    return [int(number) for number in agreed.tolist()]
