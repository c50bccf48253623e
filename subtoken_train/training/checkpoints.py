"""The checkpoints of a run on disk: one folder each, whole or not there.

``step-<optimiser step>/`` holds ``state.ckpt`` of Lightning's strategy (a file, or a folder of shards) and a JSON text,
``COMPLETE``. It is written as ``step-<step>.partial``, flushed to disk, marked and then renamed.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from subtoken_train.documents import read_json
from subtoken_train.errors import at_place, refuse
from subtoken_train.outputs import flush
from subtoken_train.typed import checked, typed

SCHEMA_VERSION = 1
MARKER, STATE, PARTIAL = "COMPLETE", "state.ckpt", ".partial"


@dataclass(frozen=True)
class Marker:
    """Contents of ``COMPLETE``; ``trained``: shape of every trained tensor by its name in the ``state_dict``."""

    step: int
    world_size: int
    strategy: str
    trained: dict[str, list[int]]
    schema_version: int = SCHEMA_VERSION


def complete(folder: Path) -> list[Path]:
    """Return the whole checkpoints in ``folder`` (``output_dir/checkpoints``), oldest first."""
    found = [item for item in _steps(folder) if item.suffix != PARTIAL and (item / MARKER).is_file()]
    return sorted(found, key=lambda item: int(item.name.removeprefix("step-")))


def newest_complete(folder: Path) -> Path | None:
    """Return the whole checkpoint of the highest step; None without one."""
    return next(reversed(complete(folder)), None)


def incomplete(folder: Path) -> list[Path]:
    """Return what a crash left behind: folders without a marker, or not renamed yet."""
    return sorted({*_steps(folder)} - {*complete(folder)})


def state_path(checkpoint: Path) -> Path:
    """Return the strategy's part of a whole checkpoint: a file, or a folder of shards."""
    read_marker(checkpoint)
    return checkpoint / STATE


def read_marker(checkpoint: Path) -> Marker:
    """Read the marker of a whole checkpoint."""
    if not (path := checkpoint / MARKER).is_file() or checkpoint.suffix == PARTIAL:
        raise ValueError(f"{checkpoint} is not a complete checkpoint (no {MARKER} in it); use another one of the run")
    with at_place(f"{path} cannot be read (", f"); remove {checkpoint} to use an older checkpoint"):
        content = checked(dict[str, Any], read_json(path), "it")
        if (version := checked(int, content.get("schema_version"), "schema_version")) <= SCHEMA_VERSION:
            marker = typed(Marker, content, "it")
            refuse((marker.step < 0 or marker.world_size < 1, f"step {marker.step} of {marker.world_size} processes"))
            return marker
    raise ValueError(f"{checkpoint} was written in layout {version}, and this reads up to {SCHEMA_VERSION}: upgrade")


def begin(folder: Path, step: int) -> Path:
    """Make an empty ``.partial`` folder for the checkpoint of ``step``."""
    if (partial := folder / f"step-{step}{PARTIAL}").exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def seal(partial: Path, marker: Marker) -> Path:
    """Flush ``partial``, add the marker and give the folder its name; returns the checkpoint."""
    for folder, _, names in os.walk(partial):
        for name in names:
            flush(Path(folder) / name)
        flush(Path(folder))
    path = partial / MARKER
    path.write_text(json.dumps(asdict(marker), indent=1) + "\n", encoding="utf-8")
    flush(path)
    flush(partial)
    checkpoint = partial.with_suffix("")
    if checkpoint.exists():  # no marker in it, or it would not be written again
        shutil.rmtree(checkpoint)
    partial.rename(checkpoint)
    flush(partial.parent)
    return checkpoint


def keep_newest(folder: Path, count: int) -> None:
    """Remove all but the newest ``count`` whole checkpoints, and every ``.partial`` folder."""
    for checkpoint in complete(folder)[:-count]:  # half of one is never taken for a checkpoint
        checkpoint.rename(checkpoint.with_name(checkpoint.name + PARTIAL))
    for item in _steps(folder):
        if item.suffix == PARTIAL:
            shutil.rmtree(item)


def _steps(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    names = [(item, item.name.removesuffix(PARTIAL)) for item in folder.iterdir() if item.is_dir()]
    return [item for item, name in names if name.startswith("step-") and name.removeprefix("step-").isdigit()]
