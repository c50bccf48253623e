"""Read and append the records of an arm on a task. What is finished stays; a line that was cut off is taken away."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from subtoken_train.documents import check_regular
from subtoken_train.evaluation.results.manifest import SAMPLES_GLOB
from subtoken_train.evaluation.results.record import SampleRecord

MAX_LINE = 2**24
"""Bytes of one record."""


def read_samples(folder: Path) -> dict[str, SampleRecord]:
    """All finished samples of ``folder``, by id, from the files of all processes.

    A last line without its newline is a sample that was being written when the run was killed; it is left out.

    Raises:
        ValueError: a line is no record, or an id is there twice.
    """
    found: dict[str, SampleRecord] = {}
    for path in sorted(folder.glob(SAMPLES_GLOB)):
        for number, line in enumerate(_lines(path), start=1):
            if line.endswith(b"\n"):
                record = SampleRecord.parse(line, f"{path}, line {number}")
                if record.id in found:
                    raise ValueError(f"{path}, line {number}: sample {record.id!r} is there twice; remove one of them")
                found[record.id] = record
    return found


class SampleWriter:
    """Appends the records of one process.

    Args:
        folder: of the arm and task.
        rank: of this process.
        processes: how many there are.
    """

    def __init__(self, folder: Path, rank: int = 0, processes: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(SAMPLES_GLOB) if rank == 0 else ():
            _drop_torn_line(path)
        self.path = folder / f"samples-{rank}-of-{processes}.jsonl"

    def append(self, records: Iterable[SampleRecord]) -> None:
        """Write a batch and wait until it is on disk: after this a kill loses nothing of it."""
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(record.line() for record in records))
            file.flush()
            os.fsync(file.fileno())


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, which may end within a character; one that is too long for a record is refused."""
    check_regular(path)
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE + 1):
            if len(line) > MAX_LINE:
                raise ValueError(f"{path} has a line of more than {MAX_LINE:,} bytes, which is no record of a sample")
            yield line


def _drop_torn_line(path: Path) -> None:
    """Cut a last line that has no newline."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
