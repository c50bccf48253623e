"""The numbers of tables and charts: scores, differences to the anchor, means over tasks.

Each has its interval and n.

Legend: s seeds, n samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from subtoken_train.evaluation.intervals import quantile_interval, resampled_means
from subtoken_train.evaluation.reporting.runs import ArmResults, Run

Scores = npt.NDArray[np.float64]

Runs = dict[int | None, Run]

Form = Literal["fraction", "points"]
Verdict = Literal["better", "worse", "level"]


@dataclass(frozen=True)
class Estimate:
    """A number of a table.

    Attributes:
        value: a fraction, or points.
        low: lower end of the bootstrap 95 % interval; None where the score is no mean over samples.
        high: its upper end.
        error: standard error, from the same resamples.
        n: samples (of one seed).
        form: fractions are printed in %.
        marks: why it is not the whole story: incomplete, partial, other seeds.
        signed: whether it is a difference.
        moot: whether compression could not change some of the answers, see ``ArmResults.is_moot``.
        falling: whether less is better.
    """

    value: float
    low: float | None
    high: float | None
    error: float | None
    n: int
    form: Form = "fraction"
    marks: tuple[str, ...] = ()
    signed: bool = False
    moot: bool = False
    falling: bool = False

    @property
    def verdict(self) -> Verdict | None:
        """What the interval of a difference says and no more; None without an interval."""
        if not self.signed or self.low is None or self.high is None:
            return None
        if self.low <= 0 <= self.high:
            return "level"
        return "better" if (self.low > 0) != self.falling else "worse"


@dataclass(frozen=True)
class Part:
    """What a figure is made of: a value and, where it is a mean over samples, the samples, [s, n].

    ``samples`` counts them in either case; all else is as in ``Estimate``.
    """

    value: float
    form: Form
    table_sn: Scores | None
    samples: int
    marks: tuple[str, ...]
    signed: bool = False
    moot: bool = False
    falling: bool = False


def score_part(arm: ArmResults, task: str, name: str | None = None) -> Part | None:
    """The score of an arm on a task: the mean over its seeds; None where no sample is answered.

    Args:
        arm: with all seeds.
        task: its name.
        name: of the score; None: the task's primary one. Others are taken for no means over samples.
    """
    runs = [run for run in arm.runs.get(task, {}).values() if run.ids]
    if not runs:
        return None
    manifest = runs[0].manifest
    chosen = manifest.primary if name is None else name
    value = float(np.mean([run.scores[chosen] for run in runs]))
    table_sn = sample_table(runs)
    means = chosen == manifest.primary and all(run.is_mean for run in runs)
    form: Form = "points" if chosen in manifest.points else "fraction"
    falling = not runs[0].higher_is_better
    return Part(
        value,
        form,
        table_sn if means else None,
        table_sn.shape[1],
        marks(runs),
        moot=arm.is_moot(task),
        falling=falling,
    )


def difference_part(arm: ArmResults, anchor: ArmResults, task: str) -> Part | str | None:
    """Arm minus anchor on a task, paired by sample.

    None where one of them has no samples, words where they cannot be paired.
    """
    paired = paired_table(arm, anchor, task)
    if paired is None or isinstance(paired, str):
        return paired
    table_sn, seeds_differ = paired
    mine, other = score_part(arm, task), score_part(anchor, task)
    assert mine is not None
    assert other is not None
    found = tuple(dict.fromkeys([*mine.marks, *other.marks, *(["anchor of other seeds"] if seeds_differ else [])]))
    means = mine.table_sn is not None and other.table_sn is not None
    return replace(
        mine,
        value=float(table_sn.mean()) if means else mine.value - other.value,
        table_sn=table_sn if means else None,
        samples=table_sn.shape[1],
        marks=found,
        signed=True,
        moot=mine.moot or other.moot,
    )


def estimate_of(parts: Sequence[Part]) -> Estimate:
    """The mean of the parts, samples resampled within each."""
    first = parts[0]
    found = tuple(dict.fromkeys(mark for part in parts for mark in part.marks))
    tables = [part.table_sn for part in parts if part.table_sn is not None and part.table_sn.size]
    low = high = error = None
    if len(tables) == len(parts):
        draws = resampled_means(tables)
        (low, high), error = quantile_interval(draws), float(draws.std())
    return Estimate(
        float(np.mean([part.value for part in parts])),
        low,
        high,
        error,
        sum(part.samples for part in parts),
        first.form,
        found,
        first.signed,
        any(part.moot for part in parts),
        first.falling,
    )


def score_estimate(arm: ArmResults, task: str) -> Estimate | None:
    """The primary score of an arm on a task."""
    part = score_part(arm, task)
    return None if part is None else estimate_of([part])


def difference_estimate(arm: ArmResults, anchor: ArmResults, task: str) -> Estimate | str | None:
    """The paired difference of an arm and its anchor, see ``difference_part``."""
    part = difference_part(arm, anchor, task)
    return estimate_of([part]) if isinstance(part, Part) else part


def mean_estimate(arm: ArmResults, tasks: Sequence[str]) -> Estimate | None:
    """The mean over tasks; None unless all tasks are there and have fractions."""
    return _mean([score_part(arm, task) for task in tasks])


def mean_difference(arm: ArmResults, anchor: ArmResults, tasks: Sequence[str]) -> Estimate | None:
    """Difference of the means over tasks; None unless every task has a paired one of fractions."""
    return _mean([difference_part(arm, anchor, task) for task in tasks])


def _mean(parts: Sequence[Part | str | None]) -> Estimate | None:
    present = [part for part in parts if isinstance(part, Part) and part.form == "fraction"]
    return estimate_of(present) if present and len(present) == len(parts) else None


def sample_table(runs: Sequence[Run]) -> Scores:
    """Scores of the samples that all runs answered, [s, n]."""
    return np.stack(_aligned(runs))


def paired_table(arm: ArmResults, anchor: ArmResults, task: str) -> tuple[Scores, bool] | str | None:
    """Differences by sample, [s, n], and whether the seeds differ.

    Seeds that both have are paired with each other; where they share none, each of the arm's meets the anchor's mean.
    """
    mine = {seed: run for seed, run in arm.runs.get(task, {}).items() if run.ids}
    others = {seed: run for seed, run in anchor.runs.get(task, {}).items() if run.ids}
    if not mine or not others:
        return None
    if len({run.manifest.samples_sha256 for run in (*mine.values(), *others.values())}) > 1:
        return "other samples"
    shared = [seed for seed in mine if seed in others]
    first = [mine[seed] for seed in shared] or list(mine.values())
    second = [others[seed] for seed in shared] or list(others.values())
    rows = _aligned([*first, *second])
    if not len(rows[0]):
        return "no shared samples"
    first_sn, second_sn = np.stack(rows[: len(first)]), np.stack(rows[len(first) :])
    return first_sn - (second_sn if shared else second_sn.mean(0)), not shared


def marks(runs: Sequence[Run]) -> tuple[str, ...]:
    """What keeps the runs from being a full set of answers, in words."""
    words = []
    for run in runs:
        manifest = run.manifest
        if not run.complete:
            words.append(f"incomplete: {len(run.ids):,} of {manifest.rows:,}")
        if manifest.partial:
            words.append(f"partial: {manifest.rows:,} of {manifest.expected_rows:,}")
    return tuple(dict.fromkeys(words))


def _aligned(runs: Sequence[Run]) -> list[Scores]:
    """Every run's scores of the samples that all answered, in one order."""
    shared = shared_ids(runs)
    places = [{name: place for place, name in enumerate(run.ids)} for run in runs]
    return [run.scores_n[[place[name] for name in shared]] for run, place in zip(runs, places, strict=True)]


def shared_ids(runs: Sequence[Run]) -> list[str]:
    """Ids of the samples that all runs answered, in the first one's order."""
    others = [set(run.ids) for run in runs[1:]]
    return [name for name in runs[0].ids if all(name in ids for ids in others)]
