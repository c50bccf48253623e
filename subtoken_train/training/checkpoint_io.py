"""Checkpoint files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write beside the target, flush to disk, rename: a crash or a full disk leaves the previous file intact."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` to the local file ``path``."""
        target = Path(path)
        temporary = target.with_name(target.name + ".partial")
        super().save_checkpoint(checkpoint, temporary, storage_options)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
