"""Folder of a run: its marker and lock, and the swap with the run that was there.

A new run of an old name begins *beside* the old one, in ``NAME.new-1a2b3c4d``. When its first whole checkpoint stands,
the old one is renamed (``NAME.replaced-1a2b3c4d``) and the new one takes its name; a link with the new one's first name
stays until the process ends, for loggers that open their files by path. When the new adapter is whole, the known parts
of the old run are removed; what else somebody put there is moved into the new run's folder and stays. Whatever ends a
process in between, the old run is whole in one of the two places, and the next ``fit`` goes on from there.

These functions touch the file system alone, in the first process of a run only.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from subtoken_train.artifact.whole_folder import ADAPTER_FILES, CONFIG_FILE, Layout, names_of
from subtoken_train.documents import read_json, real_path
from subtoken_train.outputs import STAGE, flush, make_folder, take_lock, unmake_folders, write_whole
from subtoken_train.training.checkpoints import PARTIAL, newest_complete
from subtoken_train.typed import typed
from subtoken_train.version import __version__

MARKER_FILE, LOCK_FILE = ".subtoken-run.json", ".lock"
SCHEMA_VERSION = 1
LOCK_SECONDS = 8.0
"""Seconds that a run waits for the folder: the data-loading workers of a killed one live on for up to five seconds."""

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
"""Files and folders that ``fit`` writes into a run's folder."""


@dataclass(frozen=True)
class RunMarker:
    """Contents of ``.subtoken-run.json``.

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
    """Return the marker of a run that begins now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return RunMarker(__version__, now, os.environ.get("SLURM_JOB_ID"), staged, replaces)


def read_run_marker(folder: Path) -> RunMarker | None:
    """Return a folder's marker; None without one."""
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
    """Return whether a folder holds what a run made: a whole checkpoint, or an adapter."""
    return newest_complete(folder / "checkpoints") is not None or (folder / "adapter" / CONFIG_FILE).is_file()


def requeued_with_work(folder: Path, overwrite: bool) -> bool:
    """Return whether SLURM runs this job again (the first command, repeated) and a checkpoint is there to go on from.

    A run that another job began, and that this one is to ``overwrite``, is not its own work.
    """
    again = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0 and newest_complete(folder / "checkpoints") is not None
    if not again or not overwrite:
        return again
    marker = read_run_marker(folder)
    return marker is None or marker.job == os.environ.get("SLURM_JOB_ID")  # a run of 0.1 does not say


def lock_run(folder: Path, seconds: float | None = None) -> FileLock:
    """Take an existing folder for this process; the system gives it back whatever ends the process."""
    try:
        return take_lock(folder / LOCK_FILE, LOCK_SECONDS if seconds is None else seconds)
    except Timeout:
        raise ValueError(f"another 'fit' is writing to {folder}; wait for it, or choose another --output_dir") from None


_NEW, _REPLACED = ".new-", ".replaced-"
_TOKEN = re.compile(re.escape(_NEW) + "[0-9a-f]{8}")


def place_beside(folder: Path) -> Path:
    """Return a new name beside a run's folder for its replacement; a link is followed to the folder itself."""
    real = real_folder(folder)
    return real.with_name(f"{real.name}{_NEW}{secrets.token_hex(4)}")


def final_names(text: str, place: Path) -> str:
    """Return a text whose paths name the run's folder, not the ``place`` beside it where the run begins."""
    _, mark, token = place.name.rpartition(_NEW)
    return text.replace(mark + token, "") if _TOKEN.fullmatch(mark + token) else text


def settle_after_kill(folder: Path) -> bool:
    """Let a run that was killed just when its first checkpoint stood take its place, unless somebody writes there.

    Returns:
        Whether there was one.
    """
    real, settled = real_folder(folder), False
    for place in places_beside(real):
        if place.is_symlink() or newest_complete(place / "checkpoints") is None:
            continue
        if real.exists() and read_run_marker(real) is None:  # not what was to be replaced
            continue
        locks: list[FileLock] = []
        try:
            for taken in filter(Path.exists, (place, real)):
                locks.append(lock_run(taken, 0))
            swap(place, real)
            settled = True
        except ValueError:  # somebody writes there: it is not ours to settle
            continue
        finally:
            for lock in locks:
                lock.release()
    return settled


def real_folder(folder: Path) -> Path:
    """Return the folder itself if a name is a link or ends in dots."""
    return real_path(folder) if folder.is_symlink() or folder.name in ("", "..") else folder


def replaced_name(place: Path, real: Path) -> str:
    """Return the name that the run in ``real`` gets when the one in ``place`` takes its own."""
    return f"{real.name}{_REPLACED}{place.name.rpartition(_NEW)[2]}"


def waiting(real: Path, names: tuple[str, ...]) -> list[Path]:
    """Return those of ``names`` that are old runs beside ``real`` and still there; other names lead nowhere."""
    ours = [name for name in names if name.startswith(real.name + _REPLACED) and Path(name).name == name]
    return [old for old in map(real.with_name, ours) if _is_old_run(old)]


def _is_old_run(folder: Path) -> bool:
    """Return whether a folder is a marked run, or what is left of one: an empty folder."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return read_run_marker(folder) is not None or not any(folder.iterdir())


def _is_bare(place: Path) -> bool:
    """Return whether a folder was made for a run that was killed before it could mark it."""
    begun = (MARKER_FILE + PARTIAL, f".{MARKER_FILE}.")  # of 0.1, of ``write_whole``
    return all(name == LOCK_FILE or name.startswith(begun) for name in os.listdir(place))


def places_beside(real: Path) -> Iterator[Path]:
    """Yield runs that began beside ``real`` to replace it, and links that such runs left."""
    names = sorted(os.listdir(real.parent)) if real.parent.is_dir() else []
    ours = [name for name in names if name.startswith(real.name) and _TOKEN.fullmatch(name.removeprefix(real.name))]
    for place in map(real.with_name, ours):
        if place.is_symlink():
            if os.readlink(place) == real.name:
                yield place
        elif place.is_dir():
            marker = read_run_marker(place)
            if _is_bare(place) if marker is None else marker.staged == place.name:
                yield place


def swap(place: Path, real: Path) -> None:
    """Rename the run in ``real`` and let the one in ``place`` take its name."""
    old = real.with_name(replaced_name(place, real))
    if there := real.exists():
        real.rename(old)
    try:
        place.rename(real)
    except OSError:
        if there:
            old.rename(real)
        raise
    flush(real.parent)
    if old.is_dir():
        carry_over(old, real)


def carry_over(old: Path, new: Path) -> None:
    """Move what no run of ours wrote from an old run's folder into the new one's, where there is room for it."""
    for item in RUN.others(old):
        target = new / item.relative_to(old)
        if not target.exists() and not target.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            item.rename(target)


def check_replaceable(folder: Path) -> None:
    """Raise ``ValueError`` unless a folder is ours to replace: it has a marker and can be renamed."""
    if read_run_marker(folder) is None:
        raise ValueError(
            f"{folder} holds files and no marker of a run (runs of version 0.1 have none), so it is never replaced; "
            "choose another --output_dir, or move it away"
        )
    if real_path(Path.cwd()).is_relative_to(real_path(folder)):
        raise ValueError(f"{folder} holds the folder you are in, so it is not replaced; choose another --output_dir")
    if real_path(folder).is_mount():
        raise ValueError(f"{folder} is a mount point and cannot be renamed; choose a folder in it as --output_dir")


class RunFolder:
    """The folder of one run from before its start to its end.

    Args:
        folder: ``output_dir``, as the user named it.
        place: where this run is written first; the same, unless it replaces a run.
    """

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder, self.place = folder, place
        self._real = real_folder(folder)
        self._standing = place == folder
        self._locks: list[FileLock] = []
        self._made: list[Path] = []
        self._empty = False
        self._marker: RunMarker | None = None

    @property
    def staged(self) -> bool:
        """Return whether this run is to replace another one."""
        return self.place != self.folder

    @property
    def current(self) -> Path:
        """Return the run's present folder."""
        return self.folder if self._standing else self.place

    def check(self, resume: bool) -> None:
        """Find out before anything is loaded whether a run may be written here, and keep others out of an old one."""
        if "\0" in str(self.folder):
            raise ValueError(f"{self.folder} contains a NUL character, which no folder name can")
        if not self.folder.is_dir():
            if self.folder.exists():
                raise ValueError(f"{self.folder} is a file; choose another --output_dir")
            if ".." in self.folder.parts:  # making it would make what it leads through
                raise ValueError(
                    f"{self.folder} leads through a folder that does not exist; choose another --output_dir"
                )
            return
        if self.staged:
            check_replaceable(self.folder)
        marker = read_run_marker(self.folder)
        if not (self.staged or resume):
            self._check_free(marker is not None)
        elif not self._locks:
            self._locks.append(lock_run(self.folder))

    def _check_free(self, marked: bool) -> None:
        if not has_work(self.folder):
            if not marked and any(item.name != LOCK_FILE for item in self.folder.iterdir()):
                raise ValueError(f"{self.folder} holds files but is not a run; choose another --output_dir")
        elif marked:
            aside = f"; the run before it is in {', '.join(map(str, self.replaced()))}" if self.replaced() else ""
            raise ValueError(f"{self.folder} holds a run; pass --overwrite, --resume, or another --output_dir{aside}")
        else:
            raise ValueError(
                f"{self.folder} holds a run without a marker (of version 0.1), which is never replaced; pass --resume, "
                "or another --output_dir"
            )

    def open(self, resume: bool) -> None:
        """Make, lock and mark the folder that the run is written into; a resumed run already has one."""
        self._drop_stale()
        if resume:
            self._marker = read_run_marker(self.folder)
            return
        if not self.place.is_dir():
            self._made = make_folder(self.place)
        self._empty = not any(self.place.iterdir())
        self._locks.append(lock_run(self.place))
        if not self.staged:
            self.check(resume)
        self._mark()

    def remake(self) -> bool:
        """Make, mark and lock the run's folder again where somebody removed it; return whether it was so."""
        if self._marker is None or (self.current / MARKER_FILE).is_file():
            return False
        self.current.mkdir(parents=True, exist_ok=True)
        if not (self.current / LOCK_FILE).exists():
            self._locks.append(lock_run(self.current, 0))
        write_run_marker(self.current, self._marker)
        return True

    def take_place(self) -> None:
        """Give the run its name, once: the run that had it is renamed."""
        if self._standing:
            return
        swap(self.place, self._real)
        self._standing = True
        self.place.symlink_to(self._real.name)

    def finish(self) -> list[str]:
        """Remove what this run replaces, and say what is kept of it. To be called once the adapter is whole."""
        self.take_place()
        marker, said = read_run_marker(self.folder), []
        for old in self.replaced():
            carry_over(old, self._real)
            if kept := RUN.remove(old):
                said.append(f"kept in {old}, no part of a run: {names_of(kept, old)}")
            if others := RUN.others(self._real):
                said.append(f"kept in {self.folder}, no part of a run: {names_of(others, self._real)}")
        if marker is not None and marker.replaces:
            write_run_marker(self.folder, replace(marker, replaces=()))
        return said

    def close(self, keep: bool) -> None:
        """Let go of the folder; a second time there is nothing to do.

        What has no whole checkpoint stays with ``keep``; else it goes, as far as this call made it.
        """
        if self._empty and not keep and not has_work(self.current):
            current = real_folder(self.current)
            RUN.remove(current)
            if self._made:
                unmake_folders(self._made)
            else:
                current.mkdir(exist_ok=True)
        self._empty = False
        if self.staged and self.place.is_symlink():
            self.place.unlink()
        while self._locks:
            self._locks.pop().release()

    def replaced(self) -> list[Path]:
        """Return the runs that this one replaces and that are still there."""
        marker = read_run_marker(self.folder) if self._standing else None
        return waiting(self._real, marker.replaces) if marker else []

    def said(self) -> str:
        """Return words about the run that was there before; empty without one."""
        if not self._standing:
            return f"the run that was there is where it was: {self.folder}"
        if old := self.replaced():
            return f"the run that was there is in {', '.join(map(str, old))}, and is deleted once this one is complete"
        return ""

    def _mark(self) -> None:
        old = read_run_marker(self.folder)
        replaces = () if old is None else old.replaces
        self._marker = new_marker(replaces=replaces)
        if self.staged:
            self._marker = new_marker(self.place.name, (replaced_name(self.place, self._real), *replaces))
        write_run_marker(self.place, self._marker)
        if not self.staged:
            return
        probe = self.place / ".probe"  # the link that the swap leaves: better to fail now
        probe.symlink_to(self._real.name)
        probe.unlink()

    def _drop_stale(self) -> None:
        """Remove what killed runs left beside this one before they had a checkpoint."""
        for place in places_beside(self._real):
            if place.is_symlink():
                place.unlink()
            elif newest_complete(place / "checkpoints") is None:
                try:
                    lock = lock_run(place, 0)
                except ValueError:  # at work
                    continue
                RUN.remove(place)
                lock.release()
