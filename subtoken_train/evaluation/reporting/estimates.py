"""The numbers of tables and charts: scores, differences to the anchor, means over tasks.

Each has its interval and n.

Legend: s seeds, n samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from subtoken_train.evaluation.intervals import quantile_interval, resampled_means
from subtoken_train.evaluation.reporting.runs import ArmResults, Run

Scores = npt.NDArray[np.float64]
Form = Literal["fraction", "points"]
Verdict = Literal["better", "worse", "level"]
MOOT = "†"
"""Mark of an estimate that compression could not change, where grey alone would not do."""


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

    @property
    def value_text(self) -> str:
        """``61.20``, of a difference ``+1.38``: per cent of a fraction, or points as they are."""
        return f"{self._printed(self.value)}{f' {MOOT}' if self.moot else ''}"

    @property
    def interval_text(self) -> str:
        """``[60.11, 62.30]``; nothing where there is no interval."""
        return (
            "" if self.low is None or self.high is None else f"[{self._printed(self.low)}, {self._printed(self.high)}]"
        )

    def remark(self, samples: int) -> str:
        """What a cell adds: its own n where it is not the column's, and its marks."""
        own = [f"n = {self.n:,}"] if self.n != samples else []
        return "; ".join([*own, *self.marks])

    def _printed(self, value: float) -> str:
        return f"{100 * value if self.form == 'fraction' else value:{'+' if self.signed else ''}.2f}"


class Part(NamedTuple):
    """What an estimate is made of: its value without an interval, and the samples if it is a mean of them, [s, n]."""

    plain: Estimate
    table_sn: Scores | None


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
    manifest, falling = runs[0].manifest, not runs[0].higher_is_better
    chosen = manifest.primary if name is None else name
    value = float(np.mean([run.scores[chosen] for run in runs]))
    table_sn = sample_table(runs)
    means = chosen == manifest.primary and all(run.is_mean for run in runs)
    form: Form = "points" if chosen in manifest.points else "fraction"
    samples = table_sn.shape[1]
    plain = Estimate(value, None, None, None, samples, form, marks(runs), moot=arm.is_moot(task), falling=falling)
    return Part(plain, table_sn if means else None)


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
    ours, its = mine.plain, other.plain
    found = tuple(dict.fromkeys([*ours.marks, *its.marks, *(["anchor of other seeds"] if seeds_differ else [])]))
    means = mine.table_sn is not None and other.table_sn is not None
    value = float(table_sn.mean()) if means else ours.value - its.value
    moot = ours.moot or its.moot
    plain = replace(ours, value=value, n=table_sn.shape[1], marks=found, signed=True, moot=moot)
    return Part(plain, table_sn if means else None)


def estimate_of(parts: Sequence[Part]) -> Estimate:
    """The mean of the parts, samples resampled within each."""
    plains = [part.plain for part in parts]
    whole = replace(
        plains[0],
        value=float(np.mean([plain.value for plain in plains])),
        n=sum(plain.n for plain in plains),
        marks=tuple(dict.fromkeys(mark for plain in plains for mark in plain.marks)),
        moot=any(plain.moot for plain in plains),
    )
    tables = [part.table_sn for part in parts if part.table_sn is not None and part.table_sn.size]
    if len(tables) < len(parts):
        return whole
    draws = resampled_means(tables)
    low, high = quantile_interval(draws)
    return replace(whole, low=low, high=high, error=float(draws.std()))


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
    present = [part for part in parts if isinstance(part, Part) and part.plain.form == "fraction"]
    return estimate_of(present) if present and len(present) == len(parts) else None


def sample_table(runs: Sequence[Run]) -> Scores:
    """Scores of the samples that all runs answered, [s, n], in one order."""
    shared = shared_ids(runs)
    places = [{name: place for place, name in enumerate(run.ids)} for run in runs]
    return np.stack([run.scores_n[[place[name] for name in shared]] for run, place in zip(runs, places, strict=True)])


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
    table_sn = sample_table([*first, *second])
    if not table_sn.size:
        return "no shared samples"
    first_sn, second_sn = table_sn[: len(first)], table_sn[len(first) :]
    return first_sn - (second_sn if shared else second_sn.mean(0)), not shared


def marks(runs: Sequence[Run]) -> tuple[str, ...]:
    """What keeps the runs from being a full set of answers, in words."""
    words = []
    for run in runs:
        manifest = run.manifest
        if len(run.ids) < manifest.rows:
            words.append(f"incomplete: {len(run.ids):,} of {manifest.rows:,}")
        if manifest.partial:
            words.append(f"partial: {manifest.rows:,} of {manifest.expected_rows:,}")
    return tuple(dict.fromkeys(words))


def shared_ids(runs: Sequence[Run]) -> list[str]:
    """Ids of the samples that all runs answered, in the first one's order."""
    others = [set(run.ids) for run in runs[1:]]
    return [name for name in runs[0].ids if all(name in ids for ids in others)]
