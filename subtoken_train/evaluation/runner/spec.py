"""What a grid asks for: arms, tasks, and the settings that all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from subtoken_train.documents import check_file_name
from subtoken_train.errors import unknown_name
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.written_settings import parse_keep
from subtoken_train.types import Protocol

DRAWING = ("random", "static")
"""Reducers, selectors and evictions of these names take a seed."""
Anchors = Literal["auto", "none"]

_TEXTS = ("adapter", "backbone", "name", "reducer", "selector", "eviction", "scope", "kv_dtype", "protocol")


@dataclass(frozen=True)
class ArmSpec:
    """One arm, as a grid writes it.

    Attributes:
        adapter: folder or Hub id of an adapter; None: ``backbone`` alone.
        backbone: path or Hub id; with ``adapter``: where its backbone is.
        name: None: made of the other attributes.
        reducer: token reducer; None: the adapter's own (a backbone alone: none). Another one than the adapter was
            trained under makes the arm untrained, and tables say so.
        keep_ratio: share of the tokens that the reducer keeps; None: the adapter's own.
        reducer_options: further settings of the reducer, see its class.
        selector: what chooses value groups: None: the adapter's own; ``none``: nothing, all groups stay; or a
            router-free selector (``value_norm``, ``random``, ...) at the adapter's S and K.
        eviction: KV eviction after the prompt; None: none.
        eviction_keep: what it keeps: ``0.1`` of the entries, ``256tokens`` per layer, ``20MB``.
        eviction_options: settings of the eviction.
        scope: what it chooses among, ``context`` (the default, also ``visual``) or ``all``.
        kv_dtype: precision of the stored prompt.
        protocol: ``query_aware`` or ``context_first``, see ``results.manifest.ArmFacts``.
        seed: of the reducer, selector or eviction ``random``, or of the selector ``static``; None: what they have.
    """

    adapter: str | None = None
    backbone: str | None = None
    name: str | None = None
    reducer: str | None = None
    keep_ratio: float | None = None
    reducer_options: Mapping[str, Any] = field(default_factory=dict)
    selector: str | None = None
    eviction: str | None = None
    eviction_keep: str | float | None = None
    eviction_options: Mapping[str, Any] = field(default_factory=dict)
    scope: Any = None
    kv_dtype: Any = "model"
    protocol: Protocol = "query_aware"
    seed: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.adapter is None and self.backbone is None:
            raise ValueError("an arm needs adapter: DIR, or backbone: PATH for a model without one")
        if self.protocol not in get_args(Protocol):
            raise unknown_name("protocol", self.protocol, get_args(Protocol))
        if self.adapter is None and (self.reducer is None) != (self.keep_ratio is None):
            raise ValueError(f"arm {self.backbone}: reducer and keep_ratio go together, for instance fastv and 0.25")
        if self.adapter is None and self.selector is not None:
            raise ValueError(
                f"arm {self.backbone}: selector {self.selector!r} needs an adapter, whose S and K it takes"
            )
        if self.eviction is None and (self.eviction_keep is not None or self.eviction_options or self.scope):
            raise ValueError("eviction_keep, eviction_options and scope need an eviction method")
        if self.eviction is not None and self.eviction_keep is None:
            raise ValueError(f"eviction {self.eviction!r} needs eviction_keep, for instance 0.1, 256tokens or 20MB")

    def _check_types(self) -> None:
        """A YAML file may hold anything."""
        for key in _TEXTS:
            value = getattr(self, key)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"{key} of an arm must be text; got {value!r}")
        if self.name is not None:
            check_file_name(self.name, "name of an arm")
        if self.keep_ratio is not None and type(self.keep_ratio) not in (int, float):
            raise ValueError(f"keep_ratio of an arm must be a number; got {self.keep_ratio!r}")
        if self.seed is not None and (type(self.seed) is not int or not set(DRAWING) & set(self.drawn)):
            raise ValueError(
                f"seed {self.seed!r} must be a whole number, of a reducer, selector or eviction that draws: "
                f"{' or '.join(DRAWING)}"
            )
        for key in ("reducer_options", "eviction_options"):
            if not isinstance(getattr(self, key), Mapping):
                raise ValueError(f"{key} of an arm must be a mapping of settings; got {getattr(self, key)!r}")

    def compression(self, round_up: bool = False) -> Compression:
        """Eviction and precision; ``round_up`` is for anchors.

        Raises:
            ValueError: names or settings that do not exist.
        """
        options = dict(self.eviction_options)
        if self.eviction == "random" and self.seed is not None:
            options["seed"] = self.seed
        try:
            method = None if self.eviction is None else build_eviction(self.eviction, **options)
        except TypeError as error:  # a text where a number belongs
            raise ValueError(f"eviction_options of {self.eviction}: {error}") from None
        keep, unit = parse_keep(str(1 if self.eviction_keep is None else self.eviction_keep))
        return Compression(method, keep, unit, self.scope, self.kv_dtype, round_up)

    @property
    def drawn(self) -> tuple[str | None, ...]:
        """What a seed may be of."""
        return self.reducer, self.selector, self.eviction

    @property
    def overrides(self) -> bool:
        """Whether reducer or selector are others than the adapter was trained under."""
        return self.adapter is not None and any(
            (self.reducer, self.keep_ratio is not None, self.reducer_options, self.selector)
        )


@dataclass(frozen=True)
class TaskSpec:
    """A task by name, where its files are, and its options."""

    name: str
    source: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """Everything that one ``evaluate`` runs.

    Attributes:
        arms: who answers.
        tasks: what is asked.
        out: results folder.
        data_root: folder with one folder per task; a task without one there is read from the Hub.
        limit: only the first samples of each task; without it a set that is not complete is refused.
        batch_size: prompts that share a pass.
        max_length: longest prompt in tokens, visual ones included; None: what the model's positions allow.
        anchors: ``auto``: routed arms get the matched token-only anchor that the ledger names, where none of the arms
            is it; ``none``: nothing is added.
    """

    arms: tuple[ArmSpec, ...]
    tasks: tuple[TaskSpec, ...]
    out: Path
    data_root: Path = Path("data/benchmarks")
    limit: int | None = None
    batch_size: int = 16
    max_length: int | None = None
    anchors: Anchors = "auto"

    def __post_init__(self) -> None:
        if not self.arms or not self.tasks:
            raise ValueError(f"a grid needs {'arms' if self.tasks else 'tasks'}; got none")
        for name in ("limit", "batch_size", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.anchors not in get_args(Anchors):
            raise unknown_name("anchors", self.anchors, get_args(Anchors))
        twice = [task.name for i, task in enumerate(self.tasks) if task.name in [t.name for t in self.tasks[:i]]]
        if twice:
            raise ValueError(f"task {twice[0]!r} is listed twice; run its variants with --out folders of their own")


AXES = tuple(spec.name for spec in fields(ArmSpec) if not spec.name.endswith("options") and spec.name != "name")
"""What may be a list in a grid's arm: every combination becomes an arm."""


def expand_arms(content: Mapping[str, Any]) -> list[ArmSpec]:
    """The arms of one entry of a grid, the last listed key changing fastest.

    Raises:
        ValueError: an unknown key, an empty list, a name for several arms, or what ``ArmSpec`` refuses.
    """
    known = {spec.name for spec in fields(ArmSpec)}
    for key in content:
        if key not in known:
            raise unknown_name("key of an arm", key, known)
    axes = {key: value for key, value in content.items() if key in AXES and isinstance(value, Sequence)}
    axes = {key: list(value) for key, value in axes.items() if not isinstance(value, str)}
    for key, values in axes.items():
        if not values:
            raise ValueError(f"{key} of an arm is an empty list; give values, or leave it out")
    if content.get("name") is not None and any(len(values) > 1 for values in axes.values()):
        raise ValueError(f"arm {content['name']!r} stands for several; leave name out: they are named by what they are")
    combinations = product(*axes.values())
    return [ArmSpec(**{**content, **dict(zip(axes, values, strict=True))}) for values in combinations]
