"""Calibrations: numbers of a method per layer, or per head, found once for a backbone, in one small JSON file."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from subtoken_train.documents import parse_json, read_text
from subtoken_train.errors import at_place, refuse
from subtoken_train.outputs import write_whole
from subtoken_train.typed import checked, shown, typed
from subtoken_train.types import Identity

SCHEMA_VERSION = 1
MAX_CALIBRATION = 2**24
"""Bytes of a file, unless its numbers say more; a number for every channel of every head of a model of 70 billion
parameters fits."""


class Unmade(str):
    """Path of a calibration that is not made yet: settings are checked as if its numbers were there and fitted."""


class CalibratedNumbers(ABC):
    """Numbers that a method calibrates: a frozen dataclass of plain values and lists, checked in ``__post_init__``."""

    most_bytes: ClassVar[int] = MAX_CALIBRATION  # bytes of a file of them at most

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:  # noqa: B027
        """Raise ``ValueError`` if the numbers are not those of such a model."""

    def check_width(self, hidden_size: int) -> None:  # noqa: B027
        """Raise ``ValueError`` if they read states of another width than such a model's; most read none."""

    @abstractmethod
    def words(self) -> str:
        """Return the numbers for a terminal, a layer a line or column."""


class NumberTable(CalibratedNumbers):
    """Numbers whose field ``table`` has layers' rows and key-value heads' columns; ``by_layer``: columns of layers."""

    table: ClassVar[str]
    says: ClassVar[str]  # what its numbers are, for a terminal
    by_layer: ClassVar[bool] = False

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        rows, words = getattr(self, self.table), "{} layers of {} heads, and the backbone {} of {}"
        found, wanted = [len(rows), len(rows[0])], [num_layers, num_kv_heads]
        if self.by_layer:
            words, found, wanted = "{} layers, and the backbone {}", found[1:], wanted[:1]
        refuse((found != wanted, f"{self.table} has {words.format(*found, *wanted)}"))

    def words(self) -> str:
        return table_words(self.says, getattr(self, self.table))


N = TypeVar("N", bound=CalibratedNumbers)


@dataclass(frozen=True)
class CalibrationData:
    """Data that a calibration was made of; ``sha256`` of a file's content, None for what is drawn by its settings."""

    name: str
    samples: int
    tokens: int
    sha256: str | None = None


@dataclass(frozen=True)
class Calibration(Generic[N]):
    """One calibration: numbers of a method, the backbone that they are for, and how they were made."""

    method: str
    backbone: Identity
    settings: dict[str, Any]
    numbers: N
    data: CalibrationData
    digest: str = ""

    def check_backbone(self, model_type: str, digest: str, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        """Raise ``ValueError`` unless it was made on a backbone of this identity and these shapes."""
        if (model_type, digest) != (self.backbone.model_type, self.backbone.digest):
            own = f"{shown(self.backbone.path)} ({shown(self.backbone.model_type)}, {self.backbone.digest[:12]})"
            other = f"this backbone is another one ({model_type}, {digest[:12]})"
            made = f"the calibration of {self.method} was made on {own}, and {other}"
            raise ValueError(f"{made}; make its own: subtoken-train calibrate {self.method}")
        self.numbers.check_shape(num_layers, num_kv_heads, head_dim)


@dataclass(frozen=True)
class _Header:
    schema_version: int
    method: str
    backbone: Identity
    settings: dict[str, Any]
    numbers: dict[str, Any]
    data: CalibrationData


def write_calibration(path: Path, calibration: Calibration[Any], overwrite: bool = True) -> None:
    """Write the file whole or not at all."""
    record = {"schema_version": SCHEMA_VERSION, **asdict(calibration)}
    del record["digest"]
    write_whole(path, json.dumps(record, indent=1, allow_nan=False) + "\n", overwrite)


def read_calibration(path: object, method: str, kind: type[N]) -> Calibration[N]:
    """Read a calibration of a method; ``path`` is a setting, which may hold anything, so texts alone pass."""
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(f"{method} calibration is {shown(path)}; it must name a file")
    if not Path(path).is_file():
        raise ValueError(f"{method} calibration {path} is not a file; 'subtoken-train calibrate {method}' writes one")
    text = read_text(path, kind.most_bytes)
    record = checked(dict[str, Any], parse_json(text, path), path)
    version = checked(int, record.get("schema_version"), f"{path}: schema_version")
    refuse((version != SCHEMA_VERSION, f"{path} has schema {version}; this version reads {SCHEMA_VERSION}"))
    header = typed(_Header, record, path)
    refuse((header.method != method, f"{path} is a calibration of {shown(header.method)}, not of {method}"))
    with at_place(f"{path}: "):
        numbers = typed(kind, header.numbers, "numbers")
    digest = sha256(text.encode()).hexdigest()
    return Calibration(method, header.backbone, header.settings, numbers, header.data, digest)


def check_table(name: str, table: Sequence[Sequence[float]], low: float = -math.inf, high: float = math.inf) -> None:
    """Raise ``ValueError`` unless rows are of one length, 1 or more, and every number is in a range."""
    if not table or not table[0] or any(len(row) != len(table[0]) for row in table):
        raise ValueError(f"{name} must be a table: rows of one length, 1 or more")
    for i, row in enumerate(table):
        for j, value in enumerate(row):
            refuse((not low <= value <= high, f"{name}[{i}][{j}] is {value:g}; it must be in [{low:g}, {high:g}]"))


def table_words(name: str, table: Sequence[Sequence[float]]) -> str:
    """Return a table for a terminal, a row a line."""
    return "\n".join([f"{name}:", *("  ".join(f"{value:5.3f}" for value in row) for row in table)])
