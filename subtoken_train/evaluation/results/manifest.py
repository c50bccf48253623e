"""What a folder of results says of itself: which arm answered which task, under which settings.

Layout of a results folder: ``ARM/TASK/`` with ``manifest.json`` (written before the first answer) and
``samples-RANK-of-PROCESSES.jsonl`` (one ``SampleRecord`` a line, appended as batches finish). Scores are no file: they
are computed from the records, by the task's metric, whenever they are asked for.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from subtoken_train.documents import check_file_name, read_json
from subtoken_train.errors import check_range
from subtoken_train.outputs import write_whole
from subtoken_train.typed import shown, typed
from subtoken_train.types import Protocol

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"
SAMPLES_GLOB = "samples-*.jsonl"
_WRITTEN = {
    "backbone": re.compile(r".*\S.*", re.DOTALL),
    "reducer": re.compile(r"-|\w+ \d+(\.\d+)?(e-\d+)?"),
    "groups": re.compile(r"-|S\d+K\d+ \w+"),
    "eviction": re.compile(r"\S.*"),
}
"""How ``ArmFacts`` that are read again are written."""


@dataclass(frozen=True)
class ArmFacts:
    """What tables say of an arm.

    Attributes:
        name: unique in the results folder; also the folder's name.
        backbone: path or Hub id of the backbone.
        adapter: path or Hub id of the adapter; None for a backbone alone.
        reducer: ``fastv 0.25`` or ``-``.
        groups: ``S16K4 linear`` or ``-`` for token-only arms.
        eviction: ``snapkv 0.1 int8`` or ``-``.
        protocol: ``query_aware``: the question is there when the cache is compressed. ``context_first``: the context is
            compressed before the question is seen (KVCompose's protocol).
        acts: where compression acts, in words: ``in prefill``, ``after prefill``, ``in and after prefill``, ``-``.
        nominal_kv: retained share of the compressed region that the ledger promises, after eviction.
        anchor: name of the matched token-only anchor that the arm is compared with (one may serve several); None: none.
        trained: whether the arm's reduction, selection and eviction are those its adapter was trained under.
        seed: of a random reducer, selector or eviction where the grid gives one, else of the training run; None where
            neither is known.
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


@dataclass(frozen=True)
class Manifest:
    """One arm on one task.

    Attributes:
        arm: who answered.
        task: the task's registered name.
        options: the task's options.
        source: folder or Hub id that the task was read from; None: the task's own Hub id.
        rows: samples asked (all of the set, or ``limit``).
        expected_rows: samples of the complete set; None where there is no such number.
        primary: the score that tables print.
        points: scores of the task that are no fractions.
        samples_sha256: digest of all asked samples (ids, prompts, choices, references, limits of context and answer),
            in order.
        settings: batch size, dtype, device, digest of the adapter, reducer, options of the eviction, versions.
    """

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

    @property
    def partial(self) -> bool:
        """Whether only a part of the complete set was asked."""
        return self.expected_rows is not None and self.rows < self.expected_rows

    def write(self, folder: Path) -> None:
        """Write ``manifest.json`` into ``folder``, whole or not at all."""
        content = {"schema": SCHEMA_VERSION, **asdict(self)}
        write_whole(folder / MANIFEST_FILE, json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a folder's manifest.

        Raises:
            ValueError: there is none, or none that this version reads.
        """
        path = folder / MANIFEST_FILE
        try:
            content = read_json(path)
        except FileNotFoundError:
            raise ValueError(f"{folder} holds no {MANIFEST_FILE}; 'subtoken-train evaluate' writes one") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path} is {shown(content)}; it must be a group of keys")
        schema = content.pop("schema", None)
        if schema != SCHEMA_VERSION or isinstance(schema, bool):
            raise ValueError(f"{path} has schema {shown(schema)}; this version reads {SCHEMA_VERSION}")
        manifest = typed(cls, content, str(path))
        arm = manifest.arm
        check_file_name(arm.name, f"{path}: arm: name")
        for fact, pattern in _WRITTEN.items():
            value = getattr(arm, fact)
            if pattern.fullmatch(value) is None:
                words = "which 'subtoken-train evaluate' does not write"
                raise ValueError(f"{path}: arm: {fact} is {shown(value)}, {words}")
        counts = {"rows": manifest.rows, "expected_rows": manifest.expected_rows, "arm: nominal_kv": arm.nominal_kv}
        for name, count in counts.items():
            check_range(f"{path}: {name}", count, 0)
        return manifest
