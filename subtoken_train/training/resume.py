"""Whether a run can go on from a checkpoint: found out before anything is loaded or overwritten."""

from __future__ import annotations

import os
from pathlib import Path

import lightning as L

from subtoken_train.training.checkpoints import STATE, Marker, newest_complete, read_marker
from subtoken_train.training.run_marker import begun_by_this_job
from subtoken_train.training.state_file import check_archive, read_state
from subtoken_train.training.trained_tensors import check_same_shapes, shapes_of

_ONE_FILE = {"SingleDeviceStrategy", "DDPStrategy"}  # they write and read the same file


def requeued_with_work(folder: Path, overwrite: bool) -> bool:
    """Whether SLURM runs this job again (it repeats the first command) and there is a checkpoint to go on from.

    Args:
        folder: of the run.
        overwrite: whether the job replaces a run: one that another job began is not its own work.
    """
    again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0 and newest_complete(folder / "checkpoints") is not None
    return again and (not overwrite or begun_by_this_job(folder))


def check_resumable(checkpoint: Path, trainer: L.Trainer, here: dict[str, list[int]]) -> None:
    """Compare a checkpoint with the run that wants to go on from it, and read its state through.

    Args:
        checkpoint: a folder.
        trainer: of the run.
        here: the run's trained tensors, see ``trained_tensors.shapes_of``.

    Raises:
        ValueError: a damaged state, other trained tensors, a strategy that cannot read it, or another number of
            processes where each wrote a part of its own.
    """
    marker = read_marker(checkpoint)
    _check_strategy(checkpoint, marker, trainer)
    check_same_shapes(here, marker.trained, checkpoint)
    state = checkpoint / STATE
    if state.is_dir() and marker.strategy not in _ONE_FILE:
        for part in sorted(state.rglob("*.pt")):
            check_archive(part)
    else:
        check_same_shapes(here, shapes_of(read_state(state, resumes=True)["state_dict"]), checkpoint)


def _check_strategy(checkpoint: Path, marker: Marker, trainer: L.Trainer) -> None:
    here = type(trainer.strategy).__name__
    if here != marker.strategy and not {here, marker.strategy} <= _ONE_FILE:
        raise ValueError(
            f"{checkpoint} was written by {marker.strategy} and cannot be read by {here}; resume with the trainer."
            "strategy that wrote it"
        )
    if (checkpoint / STATE).is_dir() and trainer.world_size != marker.world_size:
        raise ValueError(
            f"{checkpoint} holds the parts of {marker.world_size} process(es), this run has {trainer.world_size}; "
            "resume with as many as wrote it"
        )
