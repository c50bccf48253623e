"""The processes of one evaluation, as torchrun starts them: who does what, waiting for the others, and their folder."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

from subtoken_train.evaluation.results.manifest import SAMPLES_GLOB

_PATIENCE = timedelta(days=1)  # between two meetings lies what one process answers of a task


@dataclass(frozen=True)
class Processes:
    """This process among all; a context manager that opens and closes their group.

    Attributes:
        rank: of this process.
        count: of all.
        local_rank: of this process on its machine, which is its GPU.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Processes:
        """What torchrun says (RANK, WORLD_SIZE, LOCAL_RANK); one process without it."""
        rank, count, local = (
            int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        return cls(rank, count, local)

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for all."""
        return self.rank == 0

    def mine(self, number: int) -> bool:
        """Whether piece ``number`` of the work is this process's; every piece is exactly one's."""
        return number % self.count == self.rank

    def device(self, wanted: str | None) -> str:
        """``wanted``, or this process's GPU where there is one, else the CPU; ``cuda`` is this process's GPU, too.

        Raises:
            ValueError: one GPU is named for all of several processes.
        """
        if wanted not in (None, "auto", "cuda"):
            assert wanted is not None
            if self.count > 1 and wanted.startswith("cuda"):
                raise ValueError(
                    f"device {wanted} for {self.count} processes; leave it out, each takes a GPU of its own"
                )
            return wanted
        return f"cuda:{self.local_rank}" if wanted == "cuda" or torch.cuda.is_available() else "cpu"

    def meet(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            dist.barrier()

    def __enter__(self) -> Processes:
        if self.count > 1:
            dist.init_process_group("gloo", timeout=_PATIENCE)
            if self.local_rank < torch.cuda.device_count():
                torch.cuda.set_device(self.local_rank)  # what names no device (bitsandbytes) must not meet on the first
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.count > 1:
            dist.destroy_process_group()


ONE = Processes()


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
