"""One checkpoint of a run, written by all of its processes: whole, or an error that all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lightning as L
from torch import nn

from subtoken_train.training import checkpoints
from subtoken_train.training.interrupt import CheckpointFailed
from subtoken_train.training.trained_tensors import shapes_of


def write_checkpoint(trainer: L.Trainer, folder: Path, keep_last: int, on_whole: Callable[[], object]) -> None:
    """Write the checkpoint of the present step; all processes call it.

    Args:
        trainer: of the run.
        folder: where its checkpoints are.
        keep_last: whole checkpoints that stay.
        on_whole: what process 0 calls once this one stands, before older ones go.

    Raises:
        CheckpointFailed: it could not be written; nothing of it is left, the older ones are.
        OSError: as above, in one process alone.
    """
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
        on_whole()
        checkpoints.keep_newest(folder, keep_last)

    _on_first(trainer, folder, finish)


def _on_first(trainer: L.Trainer, folder: Path, action: Callable[[], object]) -> None:
    """Let process 0 touch the disk; all of them raise if it fails."""
    failure: OSError | None = None
    if trainer.is_global_zero:
        try:
            action()
        except OSError as error:
            failure = error
            checkpoints.discard(folder, trainer.global_step)  # it may be what fills the disk
    failure = trainer.strategy.broadcast(failure)
    if failure is not None:
        where = f"the checkpoint of step {trainer.global_step} could not be written to {folder}"
        raise CheckpointFailed(f"{where}: {failure.strerror or failure}") from failure


def trained_shapes(module: nn.Module) -> dict[str, list[int]]:
    """The whole shape of every trained parameter."""
    return shapes_of({name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad})
