"""What says that a folder is a run of ours, what a run is made of, and the lock of who writes into it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from subtoken_train.artifact.whole_folder import ADAPTER_FILES, CONFIG_FILE, Layout
from subtoken_train.documents import read_json
from subtoken_train.outputs import STAGE, write_whole
from subtoken_train.training.checkpoints import newest_complete
from subtoken_train.typed import typed
from subtoken_train.version import __version__

MARKER_FILE, LOCK_FILE = ".subtoken-run.json", ".lock"
SCHEMA_VERSION = 1
LOCK_SECONDS = 8.0
"""How long a run waits for the folder: the data-loading workers of a killed one live on for up to five seconds."""

_ADAPTER_FOLDER = r"adapter(\.(partial|replaced)-[0-9a-f]{8})?"
_BEGUN = r"\.[0-9a-f]{8}"  # what ``write_whole`` of 0.2 and before left of a file, behind a dot and its name
_STAGE = rf"(checkpoints/step-\d+(\.partial)?/|logs/)?\.[^/]+{STAGE}"  # what it leaves today, if it is killed
RUN = Layout(
    files=re.compile(
        rf"{_STAGE}/(content(/.+)?|\.subtoken-stage|\.tmp[^/]+)"
        r"|\.subtoken-run\.json(\.partial)?|\.lock|\.probe|recipe\.yaml(\.partial)?"
        rf"|\.(\.subtoken-run\.json|recipe\.yaml){_BEGUN}"
        rf"|checkpoints/step-\d+(\.partial)?/(COMPLETE|state\.ckpt(\.partial)?|\.state\.ckpt{_BEGUN}|state\.ckpt/.+)"
        r"|logs/csv(-\d+)?/(metrics\.csv|hparams\.yaml)|logs/tb/(events\.out\.tfevents\..+|hparams\.yaml)"
        rf"|logs/samples-rank\d+\.(jsonl|partial)|logs/\.samples-rank\d+\.jsonl{_BEGUN}|logs/wandb/.+|{_ADAPTER_FOLDER}/({ADAPTER_FILES})"
    ),
    folders=re.compile(
        r"checkpoints(/step-\d+(\.partial)?(/state\.ckpt(/.+)?)?)?|logs(/(csv(-\d+)?|tb|wandb(/.+)?))?"
        rf"|{_ADAPTER_FOLDER}(/output)?|{_STAGE}(/content(/.+)?)?"
    ),
    last=MARKER_FILE,
    kind="a run",
)
"""What ``fit`` writes into a run's folder."""


@dataclass(frozen=True)
class RunMarker:
    """What ``.subtoken-run.json`` says.

    Attributes:
        version: of the package that began the run.
        created: when, in UTC.
        job: the SLURM job that began it; None outside of one.
        staged: name of the folder beside its own in which the run began, where it replaces another one.
        replaces: names of the runs beside it that go once this one is whole.
        schema_version: of this file.
    """

    version: str
    created: str
    job: str | None
    staged: str | None
    replaces: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION


def new_marker(staged: str | None = None, replaces: tuple[str, ...] = ()) -> RunMarker:
    """The marker of a run that begins now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return RunMarker(__version__, now, os.environ.get("SLURM_JOB_ID"), staged, replaces)


def read_run_marker(folder: Path) -> RunMarker | None:
    """A folder's marker; None without one.

    Raises:
        ValueError: it cannot be read, or a newer version wrote it.
    """
    path = folder / MARKER_FILE
    if not path.is_file():
        return None
    content = read_json(path)
    schema = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(schema, int) and schema > SCHEMA_VERSION:
        raise ValueError(f"{path} has schema {schema}, this version reads up to {SCHEMA_VERSION}; please upgrade")
    return typed(RunMarker, content, str(path))


def write_run_marker(folder: Path, marker: RunMarker) -> None:
    """Mark a folder; whole or not at all."""
    write_whole(folder / MARKER_FILE, json.dumps(asdict(marker), indent=1) + "\n")


def has_work(folder: Path) -> bool:
    """Whether a folder holds what a run made: a whole checkpoint, or an adapter."""
    return newest_complete(folder / "checkpoints") is not None or (folder / "adapter" / CONFIG_FILE).is_file()


def requeued_with_work(folder: Path, overwrite: bool) -> bool:
    """Whether SLURM runs this job again (it repeats the first command) and there is a checkpoint to go on from.

    Args:
        folder: of the run.
        overwrite: whether the job replaces a run: one that another job began is not its own work.
    """
    again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0 and newest_complete(folder / "checkpoints") is not None
    if not again or not overwrite:
        return again
    marker = read_run_marker(folder)
    return marker is None or marker.job == os.environ.get("SLURM_JOB_ID")  # a run of 0.1 does not say


def lock_run(folder: Path, seconds: float | None = None) -> FileLock:
    """Take an existing folder for this process; the system gives it back whatever ends the process.

    Args:
        folder: of a run.
        seconds: to wait for it; None: ``LOCK_SECONDS``.

    Raises:
        ValueError: another process has it.
    """
    lock = FileLock(folder / LOCK_FILE)
    try:
        lock.acquire(timeout=LOCK_SECONDS if seconds is None else seconds)
    except Timeout:
        raise ValueError(f"another 'fit' writes into {folder}; wait for it, or choose another --output_dir") from None
    return lock
