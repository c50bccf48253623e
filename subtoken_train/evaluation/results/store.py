"""The records of an arm on a task: one line of JSON per sample, read and appended.

What is finished stays; a line that was cut off is taken away.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from subtoken_train.documents import check_regular, parse_json
from subtoken_train.errors import check_range
from subtoken_train.evaluation.metrics.metric import Prediction
from subtoken_train.evaluation.results.manifest import SAMPLES_GLOB
from subtoken_train.inference.cache_report import Measured
from subtoken_train.outputs import append_whole
from subtoken_train.typed import shown, typed

_HEX = re.compile("(?:[0-9a-f]{2})*")
_COUNTS = [field.name for field in fields(Measured) if field.name not in ("kept_visual", "emptied")]
MAX_LINE = 2**24
"""Bytes of one record."""


@dataclass(frozen=True, kw_only=True)
class SampleRecord(Measured):
    """One sample of one arm and task. Everything that scoring and reports need; no model is needed again.

    Attributes:
        id: the sample's.
        kind: the sample's question kind.
        prompt_sha256: digest of what was asked, see ``prompt_digest``.
        reference: the sample's, for scoring again.
        prediction: generated text, or the log-likelihood of each choice.
        score: of this sample alone, see ``TaskMetric.score``.
    """

    id: str
    kind: str
    prompt_sha256: str
    reference: dict[str, Any]
    prediction: Prediction
    score: float

    def line(self) -> str:
        """One line of JSON, newline included.

        Raises:
            ValueError: a log-likelihood or score is NaN or infinite, which no reader of records takes.
        """
        content = asdict(self)
        told = {name: content.pop(name) for name in SampleRecord.__annotations__}  # before what was measured
        try:
            text = json.dumps({**told, **content}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except ValueError:
            raise ValueError(
                f"sample {self.id!r}: the model gave NaN or infinity; choose a wider dtype, or another adapter"
            ) from None
        return text + "\n"

    @classmethod
    def parse(cls, line: str | bytes, place: str) -> SampleRecord:
        """Read ``line`` back.

        Args:
            line: JSON.
            place: file and line, for the message.

        Raises:
            ValueError: it is no record: a key or type is another one, or a number is negative or not finite.
        """
        try:
            record = typed(cls, parse_json(line, "line"), "line")
        except ValueError as error:
            raise ValueError(f"{place} is no record of a sample ({error})") from None
        for name in _COUNTS:
            check_range(f"{place}: {name}", getattr(record, name), name == "batch_size")
        if record.kept_visual is not None and _HEX.fullmatch(record.kept_visual) is None:
            raise ValueError(f"{place}: kept_visual is {shown(record.kept_visual)}; it must be hexadecimal digits")
        return record


def prompt_digest(prompt: str, choices: tuple[str, ...] = ()) -> str:
    """SHA-256 of what was asked, in hexadecimal."""
    return hashlib.sha256(json.dumps([prompt, *choices], ensure_ascii=False).encode()).hexdigest()


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
            os.truncate(path, _whole_bytes(path))  # a last line that was cut off
        self.path = folder / f"samples-{rank}-of-{processes}.jsonl"

    def append(self, records: Iterable[SampleRecord]) -> None:
        """Write a batch and wait until it is on disk: after this a kill loses nothing of it."""
        append_whole(self.path, "".join(record.line() for record in records))


def _whole_bytes(path: Path) -> int:
    """Return the bytes of a file up to its last line break; its end alone is read."""
    size = check_regular(path)
    with path.open("rb") as file:
        begin = max(0, size - MAX_LINE)
        file.seek(begin)
        end = file.read(MAX_LINE).rfind(b"\n")
    if end < 0 and begin:
        raise ValueError(f"{path} ends with {MAX_LINE:,} bytes without a line break; it holds no records of samples")
    return begin + end + 1


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, which may end within a character; one that is too long for a record is refused."""
    check_regular(path)
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE + 1):
            if len(line) > MAX_LINE:
                raise ValueError(f"{path} has a line of more than {MAX_LINE:,} bytes, which is no record of a sample")
            yield line
