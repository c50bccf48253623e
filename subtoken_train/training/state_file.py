"""The state file of a checkpoint: written whole or not at all, and read as data.

Nothing in it is run when it is read, and damage is found before anything is loaded.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
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
