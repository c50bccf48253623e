"""Where a run is written, and what becomes of the run that was there.

A new run of an old name begins *beside* the old one, in ``NAME.new-1a2b3c4d``. When its first whole checkpoint stands,
the old one is renamed (``NAME.replaced-1a2b3c4d``) and the new one takes its name; a link with the new one's first name
stays until the process ends, for loggers that open their files by path. When the new adapter is whole, the known parts
of the old run are removed; what else somebody put there is moved into the new run's folder and stays. Whatever ends a
process in between, the old run is whole in one of the two places, and the next ``fit`` goes on from there.

These functions touch the file system alone, in the first process of a run only.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from subtoken_train.artifact.whole_folder import names_of
from subtoken_train.documents import real_path
from subtoken_train.outputs import make_folder, unmake_folders
from subtoken_train.training.checkpoints import newest_complete
from subtoken_train.training.run_marker import (
    LOCK_FILE,
    RUN,
    has_work,
    lock_run,
    new_marker,
    read_run_marker,
    write_run_marker,
)
from subtoken_train.training.run_places import carry_over, places_beside, real_folder, replaced_name, swap, waiting


def check_replaceable(folder: Path) -> None:
    """Raise a worded ``ValueError`` unless a folder is ours to replace: it has a marker and can be renamed."""
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

    @property
    def staged(self) -> bool:
        """Whether this run is to replace another one."""
        return self.place != self.folder

    @property
    def current(self) -> Path:
        """Where the run lies now."""
        return self.folder if self._standing else self.place

    def check(self, resume: bool) -> None:
        """Find out before anything is loaded whether a run may be written here, and keep others out of an old one.

        Raises:
            ValueError: a run that was not asked to go, files that no run of ours wrote, or another process at work.
        """
        if "\0" in str(self.folder):
            raise ValueError(f"{self.folder} holds a NUL character, and no folder has such a name")
        if not self.folder.is_dir():
            if self.folder.exists():
                raise ValueError(f"{self.folder} is a file; choose another --output_dir")
            if ".." in self.folder.parts:  # making it would make what it leads through
                raise ValueError(f"{self.folder} leads through a folder that is not there; choose another --output_dir")
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
                raise ValueError(f"{self.folder} holds files and is no run; choose another --output_dir")
        elif marked:
            aside = f"; the run before it is in {', '.join(map(str, self.replaced()))}" if self.replaced() else ""
            raise ValueError(f"{self.folder} holds a run; pass --overwrite, --resume, or another --output_dir{aside}")
        else:
            raise ValueError(
                f"{self.folder} holds a run without a marker (of version 0.1), which is never replaced; pass --resume, "
                "or another --output_dir"
            )

    def open(self, resume: bool) -> None:
        """Make, lock and mark the folder that the run is written into; a resumed run has all that.

        Raises:
            ValueError: see ``check``; somebody may have been there since.
        """
        self._drop_stale()
        if resume:
            return
        if not self.place.is_dir():
            self._made = make_folder(self.place)
        self._empty = not any(self.place.iterdir())
        self._locks.append(lock_run(self.place))
        if not self.staged:
            self.check(resume)
        self._mark()

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

        Args:
            keep: whether what has no whole checkpoint stays; else it goes, as far as this call made it.
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
        """The runs that this one replaces and that are still there."""
        marker = read_run_marker(self.folder) if self._standing else None
        return waiting(self._real, marker.replaces) if marker else []

    def said(self) -> str:
        """Where the run is that was there before; empty without one."""
        if not self._standing:
            return f"the run that was there is where it was: {self.folder}"
        if old := self.replaced():
            return f"the run that was there is in {', '.join(map(str, old))}, and goes once this one is whole"
        return ""

    def _mark(self) -> None:
        old = read_run_marker(self.folder)
        replaces = () if old is None else old.replaces
        if not self.staged:
            write_run_marker(self.place, new_marker(replaces=replaces))
            return
        replaces = (replaced_name(self.place, self._real), *replaces)
        write_run_marker(self.place, new_marker(self.place.name, replaces))
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
