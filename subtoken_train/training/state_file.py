"""The state file of a checkpoint: written whole or not at all, with every process's random state, and read as data.

Nothing in it is run when it is read, and damage is found before anything is loaded.
"""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from subtoken_train.outputs import write_whole

_HOLDS = {
    "loops": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "epoch": int,
    "global_step": int,
    "random_state": list,
}
"""What is restored beside the tensors, and of which type."""


def read_state(state: Path, resumes: bool = False) -> dict[str, Any]:
    """What ``trainer.save_checkpoint`` wrote into one file, on the CPU; tensors are mapped from it.

    Args:
        state: the file.
        resumes: whether training goes on from it, so that more than the trained tensors must be there.

    Raises:
        ValueError: it is cut off or damaged (every part carries a checksum), would run code, is no state of a training,
            or a trained tensor holds integers, NaN or infinity.
    """
    check_archive(state)
    try:
        content = torch.load(state, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a pickle may name anything, and its reader raise anything
        raise _unreadable(state, "it holds more than tensors and plain values") from error
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise _unreadable(state, "it has no state_dict")
    for key, kind in _HOLDS.items() if resumes else ():
        if type(content.get(key)) is not kind:
            raise _unreadable(state, f"it has no {key} as training writes it")
    for name, tensor in content["state_dict"].items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise _unreadable(state, f"{str(name)[:80]} is no tensor of numbers that can be trained")
        if not torch.isfinite(tensor).all():
            raise _unreadable(state, f"tensor {name[:80]} holds NaN or infinity")
    return content


def check_archive(path: Path) -> None:
    """Read a file that torch wrote through, and compare the checksums of its parts.

    Raises:
        ValueError: it is cut off, damaged, or of another kind.
    """
    if not path.is_file():
        raise _unreadable(path, "it is missing")
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except PermissionError:
        raise
    except Exception:  # zipfile's reader raises many kinds for broken headers
        raise _unreadable(path, "it is cut off, or was not written by training") from None
    if broken is not None:
        raise _unreadable(path, f"its part {broken[:80]!r} is damaged")


def _unreadable(state: Path, reason: str) -> ValueError:
    return ValueError(
        f"{state} cannot be read as a checkpoint: {reason}; remove {state.parent} to use an older checkpoint"
    )


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write beside the target, flush to disk, rename: a crash or a full disk leaves the previous file intact."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` to the local file ``path``.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        content = io.BytesIO()
        torch.save(checkpoint, content)  # straight into a file, a full disk would come out as a RuntimeError of torch's
        write_whole(Path(path), content.getbuffer())


class RandomState(Callback):
    """Saves Python's, NumPy's and torch's generators of all processes, and restores each at its next batch."""

    def __init__(self) -> None:
        self._resumed: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the states of all processes into ``checkpoint``; all of them take part."""
        states = [current_state()]
        if trainer.world_size > 1:
            states *= trainer.world_size
            torch.distributed.all_gather_object(states, states[0])
        checkpoint["random_state"] = states

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep this process's state until the first batch: loading data and sanity checks draw numbers too."""
        states = checkpoint["random_state"]
        if len(states) != trainer.world_size:
            rank_zero_warn(
                f"the checkpoint was written by {len(states)} process(es), this run has {trainer.world_size}: dropout "
                "will not be what it would have been"
            )
        self._resumed = states[trainer.global_rank % len(states)]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Restore the generators before the first batch after a resume."""
        if self._resumed:
            restore_state(self._resumed)
            self._resumed = {}


def current_state() -> dict[str, Any]:
    """This process's generators, in types that ``torch.load(weights_only=True)`` reads."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  # libraries draw from it
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_state(state: dict[str, Any]) -> None:
    """Set this process's generators to what ``current_state`` gave."""
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    numpy_state = (kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss)
    np.random.set_state(numpy_state)  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
