"""Folder of a run: its marker and lock, and the new name of the run that was there.

``--overwrite`` renames a run to ``NAME.1`` (the next free number); a successor that fails before its first step gives
the name back.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from subtoken_train.artifact.whole_folder import CONFIG_FILE, RECIPE_FILE, free_name
from subtoken_train.documents import read_json, real_path
from subtoken_train.errors import refuse
from subtoken_train.outputs import take_lock, unmake_folders, write_whole
from subtoken_train.training.checkpoints import newest_complete
from subtoken_train.typed import typed
from subtoken_train.version import __version__

MARKER_FILE, LOCK_FILE = ".subtoken-run.json", ".lock"
SCHEMA_VERSION = 1
LOCK_SECONDS = 8.0
"""Seconds that a run waits for the folder: the data-loading workers of a killed one live on for up to five seconds."""
_FORMER = ("staged", "replaces")  # keys of markers by version 0.3 and before, which swapped running folders


@dataclass(frozen=True)
class RunMarker:
    """Contents of ``.subtoken-run.json``: ``created`` in UTC, ``job`` the SLURM job that began it (None: none did)."""

    version: str
    created: str
    job: str | None
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def new(cls) -> Self:
        """Make the marker of a run that begins now."""
        return cls(__version__, datetime.now(UTC).isoformat(timespec="seconds"), os.environ.get("SLURM_JOB_ID"))

    def write(self, folder: Path) -> None:
        """Mark a folder; whole or not at all."""
        write_whole(folder / MARKER_FILE, json.dumps(asdict(self), indent=1) + "\n")


def read_run_marker(folder: Path) -> RunMarker | None:
    """Return a folder's marker; None without one."""
    if not (path := folder / MARKER_FILE).is_file():
        return None
    content = read_json(path)
    if isinstance(content, dict):
        schema = content.get("schema_version")
        if isinstance(schema, int) and schema > SCHEMA_VERSION:
            raise ValueError(f"{path} has schema {schema}, this version reads up to {SCHEMA_VERSION}; please upgrade")
        content = {key: value for key, value in content.items() if key not in _FORMER}
    return typed(RunMarker, content, str(path))


def has_work(folder: Path) -> bool:
    """Return whether a folder holds what a run made: a whole checkpoint, or an adapter."""
    return newest_complete(folder / "checkpoints") is not None or (folder / "adapter" / CONFIG_FILE).is_file()


def requeued_with_work(folder: Path, overwrite: bool) -> bool:
    """Return whether SLURM requeued this job and it has its own checkpoint (another's may be overwritten)."""
    if int(os.environ.get("SLURM_RESTART_COUNT", "0")) <= 0 or newest_complete(folder / "checkpoints") is None:
        return False
    marker = read_run_marker(folder) if overwrite else None
    return marker is None or marker.job == os.environ.get("SLURM_JOB_ID")  # a run of 0.1 does not say


def lock_run(folder: Path) -> FileLock:
    """Take an existing folder for this process; the system gives it back whatever ends the process."""
    try:
        return take_lock(folder / LOCK_FILE, LOCK_SECONDS)
    except Timeout:
        raise ValueError(f"another 'fit' is writing to {folder}; wait for it, or choose another --output_dir") from None


class RunFolder:
    """The folder of one run from before its start to its end; ``replaces``: a run is there that is to be renamed."""

    def __init__(self, folder: Path, replaces: bool = False) -> None:
        self.folder, self.replaces = folder, replaces
        self.aside: Path | None = None  # the new name of that run, once it has one
        linked = folder.is_symlink() or folder.name in ("", "..")
        self._real = real_path(folder) if linked else folder  # a link stays where it is
        self._locks: list[FileLock] = []
        self._made: list[Path] = []
        self._empty = False
        self._marker: RunMarker | None = None

    def check(self, resume: bool) -> None:
        """Find out before anything is loaded whether a run may be written here, and keep others out of an old one."""
        refuse(("\0" in str(self.folder), f"{self.folder} contains a NUL character, which no folder name can"))
        if not self.folder.is_dir():
            missing = "leads through a folder that does not exist"  # making it would make what it leads through
            refuse(
                (self.folder.exists(), f"{self.folder} is a file; choose another --output_dir"),
                (".." in self.folder.parts, f"{self.folder} {missing}; choose another --output_dir"),
            )
            return
        marker, real, new = read_run_marker(self.folder), real_path(self.folder), not self.replaces and not resume
        begun = (LOCK_FILE, MARKER_FILE, f".{MARKER_FILE}")  # a run that was killed before its marker stood
        others = marker is None and not all(item.name.startswith(begun) for item in self.folder.iterdir())
        inside = self.replaces and real_path(Path.cwd()).is_relative_to(real)
        mounted = self.replaces and real.is_mount()
        refuse(
            (inside, f"{self.folder} holds the folder you are in; choose another --output_dir, or leave it"),
            (mounted, f"{self.folder} is a mount point and cannot be renamed; choose a folder in it"),
            (new and has_work(real), f"{self.folder} holds a run; pass --overwrite, --resume, or another --output_dir"),
            (new and others, f"{self.folder} holds files but is not a run; choose another --output_dir"),
        )
        if (self.replaces or resume) and not self._locks:
            self._locks.append(lock_run(self.folder))

    def open(self, resume: bool) -> None:
        """Rename the run that was there, then make, lock and mark the folder; a resumed run has one."""
        if resume:
            self._marker = read_run_marker(self.folder)
            return
        if self.replaces:
            aside = free_name(self._real)
            self._real.rename(aside)
            self.aside, self.replaces = aside, False
            self._locks.pop().release()
        if not self._real.is_dir():
            self._made = [self._real, *(parent for parent in self._real.parents if not parent.exists())]
            self._real.mkdir(parents=True)
        self._empty = not any(self._real.iterdir())
        self._locks.append(lock_run(self._real))
        self.check(resume)  # again: another process may have been faster
        self._marker = RunMarker.new()
        self._marker.write(self._real)

    def close(self, keep: bool) -> None:
        """Let go; without ``keep``, a run without a whole checkpoint goes, and the former one gets its name back."""
        if self._empty and not keep and not has_work(self._real):
            for name in (MARKER_FILE, LOCK_FILE, RECIPE_FILE):
                (self._real / name).unlink(missing_ok=True)
            for name in ("checkpoints", "logs"):
                shutil.rmtree(self._real / name, ignore_errors=True)
            unmake_folders(self._made)
        self._empty = False
        if self.aside is not None and not keep and not self._real.exists():
            self.aside.rename(self._real)
            self.aside = None
        while self._locks:
            self._locks.pop().release()

    def said(self) -> str:
        """Return words on the run that was there; empty without one."""
        return "" if self.aside is None else f"the run that was there is in {self.aside}"
