"""A results folder belongs to one run at a time, and a run that answers nothing leaves none."""

from __future__ import annotations

import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from subtoken_train.evaluation.results.manifest import SAMPLES_GLOB
from subtoken_train.evaluation.runner.processes import Processes


class Alone:
    """Only one run writes into a results folder.

    A folder that this run made is taken away again where it fails before its first answer.

    Args:
        folder: of the results.
        processes: the first of them speaks for all.
    """

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self.processes = folder, processes
        self.lock = FileLock(folder / ".lock")
        self._made: list[Path] = []

    def __enter__(self) -> None:
        """Make the folder and lock it.

        Raises:
            ValueError: another run holds it.
        """
        if not self.processes.first:
            return
        self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"another evaluation writes into {self.folder}; wait for it, or choose another") from None

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Give it back."""
        if not self.processes.first:
            return
        answered = any(path.stat().st_size for path in self.folder.rglob(SAMPLES_GLOB))
        if kind is not None and self._made and not answered:
            shutil.rmtree(self.folder)  # the lock's file is in it, so nobody waits for it
            for parent in self._made[1:]:
                if not any(parent.iterdir()):
                    parent.rmdir()
        self.lock.release()
