"""Scores with intervals, and tables of them in the paper's layout: arms in rows below their anchors, tasks in columns.

Tasks outside the paper's seven make tables of their own, images apart from text, without means.

Legend: s seeds, n samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd

from subtoken_train.evaluation.intervals import quantile_interval, resampled_means
from subtoken_train.evaluation.reporting.runs import SAMPLES, ArmResults, Cost, Run
from subtoken_train.evaluation.results import ArmFacts
from subtoken_train.evaluation.tasks import TASKS
from subtoken_train.evaluation.tasks.task import Modality
from subtoken_train.types import grouped

Scores = npt.NDArray[np.float64]
Form = Literal["fraction", "points"]
Verdict = Literal["better", "worse", "level"]
MOOT = "†"
"""Mark of an estimate that compression could not change, where grey alone would not do."""
PAPER_TASKS = {
    "mmbench": "MMBench", "textvqa": "TextVQA", "gqa": "GQA", "pope": "POPE", "mme": "MME", "scienceqa": "SciQA",
    "vqav2": "VQAv2",
}  # fmt: skip
"""Task -> the paper's name of the column."""
MEANS = {"3-mean": ("mmbench", "textvqa", "gqa"), "7-mean": tuple(PAPER_TASKS)}
"""Declared in the paper's section 4.1; computed here, and only where all of the tasks are there."""


@dataclass(frozen=True)
class Estimate:
    """A number of a table, with its bootstrap 95 % interval where it is a mean over ``n`` samples (of one seed).

    ``moot``: compression could not change the answers, of a mean those of a task; ``table_sn``: the samples' scores,
    from which ``estimate_of`` draws the interval.
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
    table_sn: Scores | None = field(default=None, compare=False, repr=False)

    @property
    def verdict(self) -> Verdict | None:
        """Read the interval of a difference; None without an interval."""
        if not self.signed or self.low is None or self.high is None:
            return None
        return "level" if self.low <= 0 <= self.high else "better" if (self.low > 0) != self.falling else "worse"

    @property
    def value_text(self) -> str:
        """``61.20``, of a difference ``+1.38``: per cent of a fraction, or points as they are."""
        return self._printed(self.value) + (f" {MOOT}" if self.moot else "")

    @property
    def interval_text(self) -> str:
        """``[60.11, 62.30]``; nothing where there is no interval."""
        known = self.low is not None and self.high is not None
        return f"[{self._printed(self.low)}, {self._printed(self.high)}]" if known else ""

    def remark(self, samples: int) -> str:
        """Return what a cell adds: its own n where it is not the column's, and its marks."""
        return "; ".join([*([f"n = {self.n:,}"] if self.n != samples else []), *self.marks])

    def _printed(self, value: float | None) -> str:
        assert value is not None
        return f"{100 * value if self.form == 'fraction' else value:{'+' if self.signed else ''}.2f}"


def score_part(arm: ArmResults, task: str, name: str | None = None) -> Estimate | None:
    """Return an arm's (primary) score, mean over its seeds, without its interval; None without a sample."""
    if not (runs := list(arm.answered(task).values())):
        return None
    manifest, table_sn, falling = runs[0].manifest, _scores_sn(runs), not runs[0].higher_is_better
    chosen = manifest.primary if name is None else name
    value, samples = float(np.mean([run.scores[chosen] for run in runs])), table_sn.shape[1]
    form: Form = "points" if chosen in manifest.points else "fraction"
    means = table_sn if chosen == manifest.primary and all(run.is_mean for run in runs) else None
    part = Estimate(value, None, None, None, samples, form, _marks(runs), moot=arm.is_moot(task), falling=falling)
    return replace(part, table_sn=means)


def _difference_part(arm: ArmResults, anchor: ArmResults, task: str) -> Estimate | str | None:
    """Subtract anchor from arm, paired by sample and shared seed (else with the mean), or say why not."""
    mine, its = score_part(arm, task), score_part(anchor, task)
    if mine is None or its is None:
        return None
    ours, others = arm.answered(task), anchor.answered(task)
    if len({run.manifest.samples_sha256 for run in (*ours.values(), *others.values())}) > 1:
        return "other samples"
    shared = [seed for seed in ours if seed in others]
    first = [ours[seed] for seed in shared] or list(ours.values())
    table_sn = _scores_sn([*first, *([others[seed] for seed in shared] or list(others.values()))])
    if not table_sn.size:
        return "no shared samples"
    first_sn, second_sn = table_sn[: len(first)], table_sn[len(first) :]
    apart_sn = first_sn - (second_sn if shared else second_sn.mean(0))
    means = mine.table_sn is not None and its.table_sn is not None
    return replace(
        mine,
        value=float(apart_sn.mean()) if means else mine.value - its.value,
        n=apart_sn.shape[1],
        marks=_once([*mine.marks, *its.marks, *([] if shared else ["anchor of other seeds"])]),
        signed=True,
        moot=mine.moot or its.moot,
        table_sn=apart_sn if means else None,
    )


def _once(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(words))


def estimate_of(parts: Sequence[Estimate]) -> Estimate:
    """Estimate the mean of the parts, samples resampled within each."""
    whole = replace(
        parts[0], value=float(np.mean([part.value for part in parts])), n=sum(part.n for part in parts),
        marks=_once([mark for part in parts for mark in part.marks]), moot=any(part.moot for part in parts),
        table_sn=None,
    )  # fmt: skip
    tables = [part.table_sn for part in parts if part.table_sn is not None and part.table_sn.size]
    if len(tables) < len(parts):
        return whole
    draws = resampled_means(tables)
    low, high = quantile_interval(draws)
    return replace(whole, low=low, high=high, error=float(draws.std()))


def score_of(arm: ArmResults, tasks: Sequence[str]) -> Estimate | None:
    """Return an arm's primary score on a task, or the mean over several; None where one is missing or no fraction."""
    found = _estimated([score_part(arm, task) for task in tasks])
    assert not isinstance(found, str)
    return found


def difference_of(arm: ArmResults, anchor: ArmResults, tasks: Sequence[str]) -> Estimate | str | None:
    """Return the paired difference of an arm and its anchor, as ``score_of``; words where a task cannot be paired."""
    return _estimated([_difference_part(arm, anchor, task) for task in tasks])


def _estimated(parts: Sequence[Estimate | str | None]) -> Estimate | str | None:
    if len(parts) == 1 and not isinstance(parts[0], Estimate):
        return parts[0]
    found = [each for each in parts if isinstance(each, Estimate) and (len(parts) == 1 or each.form == "fraction")]
    return estimate_of(found) if len(found) == len(parts) else None


def _scores_sn(runs: Sequence[Run]) -> Scores:
    """Scores of the samples that all runs answered."""
    table = pd.concat([run.samples.score for run in runs], axis=1, join="inner", keys=range(len(runs)))
    return np.ascontiguousarray(table.to_numpy(dtype=np.float64).T)


def _marks(runs: Sequence[Run]) -> tuple[str, ...]:
    words = []
    for run in runs:
        manifest, answered = run.manifest, len(run.samples)
        words += [f"incomplete: {answered:,} of {manifest.rows:,}"] if answered < manifest.rows else []
        words += [f"partial: {manifest.rows:,} of {manifest.expected_rows:,}"] if manifest.partial else []
    return _once(words)


@dataclass(frozen=True)
class KindScores:
    """One task's kinds, in order of their first samples; ``arms``: name -> kind -> mean of the samples' scores."""

    task: str
    kinds: tuple[str, ...]
    arms: dict[str, dict[str, Estimate]]


def make_kinds(arms: Sequence[ArmResults]) -> list[KindScores]:
    """List the tasks with more kinds than one whose samples have scores in 0..1."""
    found = []
    for task in dict.fromkeys(task for arm in arms for task in arm.runs):
        estimates, order = dict[str, dict[str, Estimate]](), dict[str, None]()
        for arm in arms:
            runs = list(arm.answered(task).values())
            if runs and all(run.samples.score.between(0, 1).all() for run in runs):
                order |= dict.fromkeys(kind for run in runs for kind in run.samples.kind)
                estimates[arm.name] = _of_arm(runs, arm.is_moot(task))
        found += [KindScores(task, tuple(order), estimates)] if len(order) > 1 else []
    return found


def _of_arm(runs: Sequence[Run], moot: bool) -> dict[str, Estimate]:
    shared = pd.concat([run.samples.score for run in runs], axis=1, join="inner").index
    kinds, estimates = runs[0].samples.kind.loc[shared], {}
    for kind in kinds.unique():
        chosen = kinds.index[kinds == kind]
        part_sn = np.array([run.samples.score.loc[chosen] for run in runs], np.float64)
        mean = float(part_sn.mean())
        plain = Estimate(mean, None, None, None, part_sn.shape[1], marks=_marks(runs), moot=moot, table_sn=part_sn)
        estimates[kind] = estimate_of([plain])
    return estimates


@dataclass(frozen=True)
class ArmRow:
    """An arm in a table, its anchor, differences (or why none), and the anchor's measured KV over its own."""

    arm: ArmResults
    anchor: ArmResults | None
    scores: dict[str, Estimate | None]
    differences: dict[str, Estimate | str | None]
    cost: Cost
    anchor_ratio: float | None
    flags: tuple[str, ...]

    @property
    def printed(self) -> dict[str, float]:
        """Return a paper's numbers by column."""
        runs = [run.manifest for runs in self.arm.runs.values() for run in runs.values()]
        return {run.task: run.paper for run in runs if run.paper is not None and run.task in self.scores}


@dataclass(frozen=True)
class ScoreTable:
    """Arms in the paper's order, columns (key -> heading), and the samples that a column's largest cell rests on."""

    title: str
    columns: dict[str, str]
    samples: dict[str, int]
    rows: tuple[ArmRow, ...]


def make_tables(arms: Sequence[ArmResults]) -> tuple[ScoreTable, ...]:
    """Make the table of the paper's tasks, and those of all other image and text tasks, as far as there are results."""
    present, tables = sorted({task for arm in arms for task in arm.runs}), []
    runs = (run for arm in arms for own in arm.runs.values() for run in own.values() if not run.higher_is_better)
    falling = grouped((run.manifest.task, run.manifest.primary.replace("_", " ")) for run in runs)
    below = {task: f"{task} ({', '.join(_once(names))}, lower is better)" for task, names in falling.items()}
    if any(task in PAPER_TASKS for task in present):
        tables.append(_table("Scores, the paper's layout", {**PAPER_TASKS, **{mean: mean for mean in MEANS}}, arms))
    for modality in get_args(Modality):
        others = [task for task in present if task not in PAPER_TASKS and TASKS[task].modality == modality]
        if others:
            tables.append(_table(f"Scores, {modality} tasks", {task: below.get(task, task) for task in others}, arms))
    return tuple(tables)


def anchor_of(arm: ArmResults, arms: Sequence[ArmResults]) -> ArmResults | None:
    """Return the arm that ``arm`` names as its anchor."""
    return next((other for other in arms if other.name == arm.facts.anchor), None)


def ordered(arms: Sequence[ArmResults]) -> list[ArmResults]:
    """Sort by backbone, then uncompressed arms, then reducers, largest budget first; an anchor above its arms."""

    def place(arm: ArmResults) -> tuple[str, bool, str, float, str, bool, str]:
        facts, block = (anchor_of(arm, arms) or arm).facts, arm.facts.anchor or arm.name
        budget = facts.acts != "-", facts.reducer.split()[0], -facts.nominal_kv
        return facts.backbone, *budget, block, arm.facts.anchor is not None, arm.name

    return sorted(arms, key=place)


def method_notes(facts: ArmFacts) -> list[str]:
    """Say how an arm's training and protocol differ from those of most."""
    notes = {"untrained": not facts.trained, "context first": facts.protocol == "context_first"}
    return [words for words, there in notes.items() if there]


def _table(title: str, columns: dict[str, str], arms: Sequence[ArmResults]) -> ScoreTable:
    tasks = [column for column in columns if column not in MEANS]
    shown = [arm for arm in ordered(arms) if any(task in arm.runs for task in tasks)]
    rows = tuple(_row(arm, anchor_of(arm, arms), columns, tasks) for arm in shown)
    figures = {column: [row.scores[column] for row in rows] for column in columns}
    samples = {column: max((part.n for part in parts if part), default=0) for column, parts in figures.items()}
    return ScoreTable(title, columns, samples, rows)


def _row(arm: ArmResults, anchor: ArmResults | None, columns: dict[str, str], tasks: list[str]) -> ArmRow:
    meant = {column: MEANS.get(column, (column,)) for column in columns}
    scores, cost = {column: score_of(arm, of) for column, of in meant.items()}, cost_of(arm, tasks)
    if anchor is None:
        return ArmRow(arm, None, scores, {}, cost, None, tuple(_flags(arm, None, cost, None, tasks)))
    shared = [task for task in tasks if task in arm.runs and task in anchor.runs]
    ours, its = (cost_of(each, shared).shares["measured"] for each in (arm, anchor))
    ratio = its / ours if ours and its else None
    differences = {column: difference_of(arm, anchor, of) for column, of in meant.items()}
    return ArmRow(arm, anchor, scores, differences, cost, ratio, tuple(_flags(arm, anchor, cost, ratio, tasks)))


def cost_of(arm: ArmResults, tasks: Sequence[str]) -> Cost:
    """Add up what the arm's caches cost on these tasks, all seeds together."""
    frames = [run.samples for task in tasks for run in arm.answered(task).values()]
    return Cost(pd.concat(frames) if frames else pd.DataFrame(columns=SAMPLES))


def _flags(
    arm: ArmResults, anchor: ArmResults | None, cost: Cost, ratio: float | None, tasks: Sequence[str]
) -> list[str]:
    facts, sums, flags = arm.facts, cost.total, []
    flags += [f"its anchor {facts.anchor} has no results here"] if facts.anchor is not None and anchor is None else []
    if anchor is not None and anchor.facts.nominal_kv < facts.nominal_kv:
        flags.append(f"the anchor keeps less: {anchor.facts.nominal_kv:.3%} of the KV against {facts.nominal_kv:.3%}")
    flags += [f"the anchor takes {1 - ratio:.2%} fewer bytes (measured)"] if ratio is not None and ratio < 1 else []
    if facts.acts != "-" and sums["dense_kv_bytes"] and not cost.acted:
        flags.append("compression did nothing: no entry left the cache")
    if sums["unread_bytes"]:
        read = 1 - sums["unread_bytes"] / sums["kv_bytes"]
        flags.append(f"it frees no memory: each decoding step reads {read:.1%} of the prompts' stored KV")
    if sums["emptied"]:
        of = len(cost.samples)
        flags.append(f"nothing is left of a whole region in some layer of {sums['emptied']:,} of {of:,} prompts")
    if names := ", ".join(task for task in tasks if arm.is_moot(task)):
        flags.append(f"compression after prefill cannot change answers and choices of one token ({names})")
    return flags
