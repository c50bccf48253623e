"""A folder of results: what it says of itself, and the records of an arm on a task.

``ARM/TASK/manifest.json`` is written before the first answer, ``samples-RANK-of-PROCESSES.jsonl`` (one ``SampleRecord``
a line) as batches finish. Scores are computed from the records, by the task's metric, whenever they are asked for.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from subtoken_train.documents import check_file_name, check_regular, parse_json, read_json
from subtoken_train.errors import at_place, check_range, refuse
from subtoken_train.evaluation.metrics.metric import Prediction
from subtoken_train.inference.cache_report import Measured
from subtoken_train.outputs import append_whole, write_whole
from subtoken_train.reducers import split_settings
from subtoken_train.typed import checked, shown, typed
from subtoken_train.types import Protocol

__path__: list[str] = []  # names below it are looked for: those of ``moved.py`` lay there
SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"
SAMPLES_GLOB = "samples-*.jsonl"
MAX_LINE = 2**24
"""Bytes of one record."""
COUNTS = [field.name for field in fields(Measured) if field.name != "emptied"]
"""Numbers of a record that are measured."""
_WRITTEN = {
    "backbone": re.compile(r".*\S.*", re.DOTALL),
    "reducer": re.compile(r"-|\w+ \d+(\.\d+)?(e-\d+)?"),
    "groups": re.compile(r"-|S\d+(K\d+| bytes \d+(\.\d+)?(e-\d+)?) \w+"),
    "eviction": re.compile(r"\S.*"),
}
"""Forms of those ``ArmFacts`` that are read again."""
SAME = ("dtype", "max_length", "adapter_sha256", "reducer", "eviction_options", "calibration_sha256", "seed")
"""Settings that change answers and that ``ArmFacts`` do not tell."""
COUNTED_ANEW = frozenset({"quest", "visionzip", "fastervlm", "prumerge"})
"""Reducers that kept other numbers of tokens, by page or by image, in the records of 0.2, which know no ``matches``."""


@dataclass(frozen=True)
class ArmFacts:
    """Facts of an arm that tables show.

    Attributes:
        name: unique in the results folder; also the folder's name.
        reducer: ``fastv 0.25``; like ``groups`` (``S16K4 linear``) and ``eviction`` (``snapkv 0.1 int8``), ``-``: none.
        protocol: ``context_first``: the context is compressed before the question is seen (KVCompose's protocol).
        nominal_kv: retained share of the compressed region that the ledger promises, after eviction.
        anchor: name of the matched token-only anchor that the arm is compared with.
        trained: whether reduction, selection and eviction are those the adapter was trained under.
        seed: of what draws at random where the grid gives one, else of the training run.
    """

    name: str
    backbone: str
    adapter: str | None
    reducer: str
    groups: str
    eviction: str
    protocol: Protocol
    acts: str
    nominal_kv: float
    anchor: str | None
    trained: bool
    seed: int | None

    @property
    def by_threshold(self) -> bool:
        """Tell whether a threshold decides what stays: no bytes are promised, and they spread over samples."""
        return "threshold=" in self.eviction

    @property
    def promises(self) -> bool:
        """Tell whether ``nominal_kv`` is expected: of a budget, or a threshold's recorded mean."""
        return not self.by_threshold or " mean " in self.eviction


@dataclass(frozen=True)
class Manifest:
    """One arm on one task: ``source`` None: its own Hub id; ``paper``: the score that a paper prints, as printed."""

    arm: ArmFacts
    task: str
    options: dict[str, Any]
    source: str | None
    rows: int
    expected_rows: int | None
    primary: str
    points: list[str]
    samples_sha256: str
    settings: dict[str, Any] = field(default_factory=dict)
    paper: float | None = None

    @property
    def partial(self) -> bool:
        """Tell whether only a part of the complete set was asked."""
        return self.expected_rows is not None and self.rows < self.expected_rows

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` into ``folder``, whole or not at all."""
        write_whole(folder / MANIFEST_FILE, json.dumps({"schema": SCHEMA_VERSION, **asdict(self)}, indent=2) + "\n")

    def joined(self, folder: Path) -> "Manifest | None":
        """Return the manifest that these answers join, if any; another arm (but for its anchor) or task is refused."""
        if not (folder / MANIFEST_FILE).is_file():
            return None
        there, another = Manifest.read(folder), "choose another results folder"
        before = there.pinned()
        for name, new in self.pinned().items():
            words = f"{folder} holds answers with {name} {before[name]!r}, and now it is {new!r}"
            refuse((before[name] != new, f"{words}; {another}"))
        words = f"{folder} holds a run of {there.rows:,} samples, but only {self.rows:,} are asked for now"
        refuse((there.rows > self.rows, f"{words}; raise limit, or {another}"))
        return there

    def pinned(self) -> dict[str, Any]:
        """Return what answers that stand side by side share."""
        facts = {f"arm.{key}": value for key, value in asdict(self.arm).items() if key != "anchor"}
        settings = {key: self.settings.get(key) for key in SAME}
        if isinstance(settings["reducer"], dict):  # version 0.1 wrote every method's settings
            settings["reducer"], _ = split_settings(settings["reducer"])
            if settings["reducer"].get("name") not in COUNTED_ANEW:
                settings["reducer"].setdefault("matches", None)
        return {**facts, "task options": self.options, **settings}

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a folder's manifest; one that is missing or of another version is a ``ValueError``."""
        path = folder / MANIFEST_FILE
        try:
            content = read_json(path)
        except FileNotFoundError:
            raise ValueError(f"{folder} holds no {MANIFEST_FILE}; 'subtoken-train evaluate' writes one") from None
        refuse((not isinstance(content, dict), f"{path} is {shown(content)}; it must be a group of keys"))
        schema = content.pop("schema", None)
        if schema != SCHEMA_VERSION or isinstance(schema, bool):
            raise ValueError(f"{path} has schema {shown(schema)}; this version reads {SCHEMA_VERSION}")
        manifest = typed(cls, content, str(path))
        arm = manifest.arm
        check_file_name(arm.name, f"{path}: arm: name")
        for fact, pattern in _WRITTEN.items():
            if pattern.fullmatch(value := getattr(arm, fact)) is None:
                words = f"arm: {fact} is {shown(value)}, which 'subtoken-train evaluate' does not write"
                raise ValueError(f"{path}: {words}")
        counts = {"rows": manifest.rows, "expected_rows": manifest.expected_rows, "arm: nominal_kv": arm.nominal_kv}
        for name, count in counts.items():
            check_range(f"{path}: {name}", count, 0)
        checked(str, manifest.settings.get("device", ""), f"{path}: settings: device")
        return manifest


@dataclass(frozen=True, kw_only=True)
class SampleRecord(Measured):
    """One sample of an arm and task, its own ``score``; a prediction is a text, or choices' log-likelihoods."""

    id: str
    kind: str
    prompt_sha256: str
    reference: dict[str, Any]
    prediction: Prediction
    score: float

    def line(self) -> str:
        """Return one line of JSON, newline included; a ``ValueError`` where a number is NaN or infinite."""
        content = asdict(self)
        told = {name: content.pop(name) for name in SampleRecord.__annotations__}  # before what was measured
        try:
            text = json.dumps({**told, **content}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except ValueError:
            words = "the model gave NaN or infinity; choose a wider dtype, or another adapter"
            raise ValueError(f"sample {self.id!r}: {words}") from None
        return text + "\n"

    @classmethod
    def parse(cls, line: str | bytes, place: str) -> Self:
        """Read ``line`` back; ``place`` is file and line, for the message."""
        with at_place(f"{place} is not a record of a sample (", ")"):
            content = parse_json(line, "line")
            if isinstance(content, dict):
                content.pop("kept_visual", None)  # of versions before 0.4: the visual tokens that stayed, as bits
            record = typed(cls, content, "line")
        for name in COUNTS:
            check_range(f"{place}: {name}", getattr(record, name), name == "batch_size")
        return record


def prompt_digest(prompt: str, choices: tuple[str, ...] = ()) -> str:
    """Return the SHA-256 of what was asked, in hexadecimal."""
    return hashlib.sha256(json.dumps([prompt, *choices], ensure_ascii=False).encode()).hexdigest()


def read_samples(folder: Path, asked: Mapping[str, str] | None = None) -> dict[str, SampleRecord]:
    """Read the finished samples by id; with ``asked`` (id -> ``prompt_digest``) others are refused."""
    found: dict[str, SampleRecord] = {}
    for path in sorted(folder.glob(SAMPLES_GLOB)):
        for number, line in enumerate(_lines(path), start=1):
            if line.endswith(b"\n"):
                if (record := SampleRecord.parse(line, f"{path}, line {number}")).id in found:
                    raise ValueError(f"{path}, line {number}: sample {record.id!r} appears twice; remove one of them")
                found[record.id] = record
    for name, record in found.items():
        answer = f"{folder} holds an answer to sample {name!r}"
        if asked is not None and name not in asked:
            raise ValueError(f"{answer}, which this run does not ask for; raise limit, or choose another folder")
        if asked is not None and record.prompt_sha256 != asked[name]:
            raise ValueError(f"{answer} with another prompt; choose another folder")
    return found


class SampleWriter:
    """Appends the records of one process to the folder of an arm and task."""

    def __init__(self, folder: Path, rank: int = 0, processes: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(SAMPLES_GLOB) if rank == 0 else ():
            begin = max(0, check_regular(path) - MAX_LINE)
            with path.open("r+b") as file:  # a last line that was cut off goes
                file.seek(begin)
                end = file.read(MAX_LINE).rfind(b"\n")
                words = f"{path} ends with {MAX_LINE:,} bytes without a line break; it holds no records of samples"
                refuse((end < 0 and begin, words))
                file.truncate(begin + end + 1)
        self.path = folder / f"samples-{rank}-of-{processes}.jsonl"

    def append(self, records: Iterable[SampleRecord]) -> None:
        """Write a batch and wait until it is on disk: after this a kill loses nothing of it."""
        append_whole(self.path, "".join(record.line() for record in records))


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, which may end within a character."""
    check_regular(path)
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE + 1):
            if len(line) > MAX_LINE:
                raise ValueError(f"{path} has a line of more than {MAX_LINE:,} bytes; it is no record of a sample")
            yield line
