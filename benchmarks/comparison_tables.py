"""The matched-budget comparisons of the embedded arms, from committed run records (lists: ``comparison_lists``).

Legend: s seeds, n questions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.comparison_lists import Comparison
from benchmarks.pairs import markdown
from benchmarks.run_records import read_runs
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS
from subtoken_train.evaluation.intervals import bootstrap_interval

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """All seeds of one arm, ascending: ``scores_sn`` in 0..1, the kinds of the n questions, and the budget.

    ``measures`` are those that all of its records hold beside the score, by name, [s, n]; NaN where a question has
    none. ``prompt_bytes`` are measured, of a prompt's whole cache: text and index included; None in older records.
    """

    name: str
    seeds: tuple[int, ...]
    scores_sn: Scores
    kinds: npt.NDArray[np.str_]
    visual_tokens: str
    nominal_kv: float
    realised_kv: float
    measures: dict[str, Scores] = field(default_factory=dict)
    prompt_bytes: float | None = None

    def scores_of(self, group: str) -> Scores:
        """Scores of ``questions``, ``descriptions`` or one kind, [s, n of that group]."""
        return self.scores_sn[:, self._in(group)]

    def measure_of(self, name: str, group: str) -> Scores:
        """A measure of the same."""
        return self.measures[name][:, self._in(group)]

    def _in(self, group: str) -> npt.NDArray[np.bool_]:
        described = np.isin(self.kinds, DESCRIPTION_KINDS)
        return np.asarray({"questions": ~described, "descriptions": described}.get(group, self.kinds == group))


def read_records(folder: Path) -> dict[str, Arm]:
    """Group the run records of ``folder`` by arm."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in read_runs(folder, (*_READ, *_OLDER)):
        record = _record(run, folder)
        runs.setdefault(record["arm"], []).append(record)
    if not runs:
        raise ValueError(f"{folder} holds no run records; benchmarks/tiny_comparison.py makes them")
    if len({record["data_sha256"] for records in runs.values() for record in records}) > 1:
        raise ValueError(f"the records of {folder} answer different question files; they cannot be compared")
    return {name: _arm(name, records) for name, records in runs.items()}


_READ = ("arm", "seed", "data_sha256", "visual_tokens", "nominal_kv", "realised_kv", "kinds", "scores")
_OLDER = {"measures": {}, "kv_bytes": None}
"""What older records do not have."""


def _record(run: dict[str, Any], place: Path) -> dict[str, Any]:
    """Return a run with what its record lacks for its age."""
    missing = [name for name in _READ if name not in run]
    if missing:
        raise ValueError(f"{place}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    return {**_OLDER, **run}


def _arm(name: str, records: list[dict[str, Any]]) -> Arm:
    records = sorted(records, key=lambda record: record["seed"])
    first = records[0]
    measured = [name for name in first["measures"] if all(name in record["measures"] for record in records)]
    return Arm(
        name=name, seeds=tuple(record["seed"] for record in records),
        scores_sn=np.array([record["scores"] for record in records]), kinds=np.array(first["kinds"]),
        visual_tokens=first["visual_tokens"], nominal_kv=first["nominal_kv"],
        realised_kv=float(np.mean([record["realised_kv"] for record in records])),
        measures={name: np.array([record["measures"][name] for record in records], dtype=float) for name in measured},
        prompt_bytes=None if first["kv_bytes"] is None else first["kv_bytes"] / len(first["kinds"]),
    )  # fmt: skip


def comparison_markdown(arms: dict[str, Arm], comparison: Comparison) -> str:
    """Return a page's table: what each arm scores, with intervals over seeds and questions; others are left out."""
    head = ["arm", "KV", "seeds", *comparison.groups]
    rows = []
    for name in (name for name in comparison.arms if name in arms):
        arm = arms[name]
        cells = [_mean_cell(arm.scores_of(group)) for group in comparison.groups]
        rows.append([comparison.arms[name].words, f"{arm.nominal_kv:.1%}", str(len(arm.seeds)), *cells])
    return markdown(head, rows)


def long_rows(name: str, arms: dict[str, Arm], comparison: Comparison) -> Iterable[dict[str, Any]]:
    """Yield a row for every arm or paired difference, group of questions and measure: mean and 95 % interval."""
    for arm in (arms[own] for own in comparison.arms if own in arms):
        about = {"list": name, "arm": comparison.arms[arm.name].words, "less": "", "kv": arm.realised_kv}
        for group in (*comparison.groups, *comparison.kinds):
            yield from _figures(about, group, {"score": arm.scores_of(group)}, len(arm.seeds))
        for group in comparison.groups:
            yield from _figures(about, group, {key: arm.measure_of(key, group) for key in arm.measures}, len(arm.seeds))
    for words, first, second in _pairs(arms, comparison):
        about = dict(zip(("list", "arm", "less"), (name, *words.split(" - ", 1)), strict=True))
        for group in comparison.groups:
            apart = {"score": first.scores_of(group) - second.scores_of(group)}
            both = [key for key in first.measures if key in second.measures]
            apart |= {key: first.measure_of(key, group) - second.measure_of(key, group) for key in both}
            yield from _figures(about, group, apart, len(first.seeds))


def _figures(about: dict[str, Any], group: str, found: dict[str, Scores], seeds: int) -> Iterable[dict[str, Any]]:
    for measure, every_sn in found.items():
        figures_sn = every_sn[:, ~np.isnan(every_sn).any(0)]  # questions that have a figure in every seed
        if figures_sn.size:
            low, high = bootstrap_interval(figures_sn)
            told = {"measure": measure, "mean": float(figures_sn.mean()), "low": low, "high": high}
            yield about | {"seeds": seeds, "group": group} | told


def _pairs(arms: dict[str, Arm], comparison: Comparison) -> list[tuple[str, Arm, Arm]]:
    """Return the comparison's pairs that share a seed, in words and over the seeds that both have."""
    pairs = []
    for first, second in comparison.pairs:
        if first in arms and second in arms and (seeds := set(arms[first].seeds) & set(arms[second].seeds)):
            words = f"{comparison.arms[first].words} - {comparison.arms[second].words}"
            pairs.append((words, _with_seeds(arms[first], seeds), _with_seeds(arms[second], seeds)))
    return pairs


def _with_seeds(arm: Arm, seeds: set[int]) -> Arm:
    """The arm's runs with these seeds: a pair is compared over the seeds that both have."""
    rows = [row for row, seed in enumerate(arm.seeds) if seed in seeds]
    measures = {name: figures_sn[rows] for name, figures_sn in arm.measures.items()}
    return replace(arm, seeds=tuple(arm.seeds[row] for row in rows), scores_sn=arm.scores_sn[rows], measures=measures)


def _mean_cell(scores: Scores) -> str:
    low, high = bootstrap_interval(scores)
    return f"{100 * scores.mean():.1f} [{100 * low:.1f}, {100 * high:.1f}]"
