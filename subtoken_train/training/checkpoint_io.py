"""Checkpoint files that are whole or not there."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write beside the target, flush to disk, rename: a crash or a full disk leaves the previous file intact."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` to the local file ``path``.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        content = io.BytesIO()
        torch.save(checkpoint, content)  # straight into a file, a full disk would come out as a RuntimeError of torch's
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(target.name + ".partial")
        with temporary.open("wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
