"""The processes of one evaluation, as torchrun starts them: who does what, waiting for the others, and their folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import Timeout

from subtoken_train.evaluation.results import SAMPLES_GLOB
from subtoken_train.outputs import take_lock

_PATIENCE = timedelta(days=1)  # between two meetings lies what one process answers of a task


@dataclass(frozen=True)
class Processes:
    """This process among all, ``local_rank`` its GPU; a context manager that opens and closes their group."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Processes:
        """Read what torchrun sets; one process without it."""
        defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        return cls(*(int(os.environ.get(name, default)) for name, default in defaults.items()))

    @property
    def first(self) -> bool:
        """True if this process speaks and writes for all."""
        return self.rank == 0

    def mine(self, number: int) -> bool:
        """Tell whether piece ``number`` of the work is this process's; every piece is exactly one's."""
        return number % self.count == self.rank

    def device(self, wanted: str | None) -> str:
        """Return ``wanted``, or this process's GPU if there is one, else the CPU; ``cuda`` is this process's GPU, too.

        ``auto`` stays what it is for a process that is alone: a model may then take several GPUs.
        """
        if wanted == "auto" and self.count == 1:
            return wanted
        if wanted is not None and wanted not in ("auto", "cuda"):
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

    def __exit__(self, *_: object) -> None:
        if self.count > 1:
            dist.destroy_process_group()


ONE = Processes()


@contextmanager
def alone(folder: Path, processes: Processes) -> Iterator[None]:
    """Inside the block this run alone writes into a results folder; the first process speaks for all.

    A folder that it made is taken away again where the block fails before its first answer.
    """
    if not processes.first:
        yield
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = take_lock(folder / ".lock", 0)
    except Timeout:
        raise ValueError(f"another evaluation is writing to {folder}; wait for it, or choose another") from None
    try:
        yield
    except BaseException:
        if made and not any(path.stat().st_size for path in folder.rglob(SAMPLES_GLOB)):
            shutil.rmtree(folder)  # the lock's file is in it, so nobody waits for it
            for parent in made[1:]:
                if not any(parent.iterdir()):
                    parent.rmdir()
        raise
    finally:
        lock.release()
