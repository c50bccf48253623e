"""Accuracy against KV: arms of one method at several budgets, the area under their curve, and what a tolerance buys.

After KVCompose (Akulov et al.): r is the share of KV that is gone; a budget's loss is the mean over tasks of (R(full) -
R(compressed)) / R(full) (eq. 10), each of RULER's tasks and LongBench's sets being one (``TaskMetric.subtasks``); the
compression under a tolerance is the largest r of the piecewise linear curve with no larger loss (eq. 7 and 8). The
paper's areas have no formula and are too large for undivided ones: here they are divided by their width.

Legend: p points of a curve, ascending in r.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from subtoken_train.evaluation.metrics.short_answers import Answered
from subtoken_train.evaluation.reporting import score_tables as tables
from subtoken_train.evaluation.reporting.runs import ArmResults

AMOUNT = re.compile(r" (threshold=\S+|mean [\d.]+|[\d.,]+( tokens| bytes)?)(?= |$)")
"""Matches an eviction's budget: ``snapkv 1,024 tokens int8`` is ``snapkv int8`` without it."""
TOLERANCES = (0.10, 0.20)
NO_REFERENCE = "no uncompressed arm"
Scored = Sequence[tuple[str, str | None]]
"""Tasks of eq. 10, each with the benchmark's own task or None."""


@dataclass(frozen=True)
class Point:
    """An arm on a curve: measured share of the compressed region's KV, mean score, and relative loss (eq. 10)."""

    arm: ArmResults
    kv: float
    estimate: tables.Estimate
    loss: float | None


@dataclass(frozen=True)
class Curve:
    """One method at several budgets, ascending in compression; its uncompressed arm first, where there is one.

    ``tasks``: those that all arms answered; ``scored``: what eq. 10 is a mean over (``pope``, ``ruler/vt``); ``zero``:
    those of them whose uncompressed score is 0, which leaves no value; ``edges``: tolerance -> what ``within`` finds.
    """

    backbone: str
    name: str
    tasks: tuple[str, ...]
    points: tuple[Point, ...]
    reference: bool
    scored: tuple[str, ...]
    zero: tuple[str, ...]
    area: float | None
    edges: dict[float, float]

    @property
    def span(self) -> tuple[float, float]:
        """Smallest and largest r."""
        return 1 - self.points[0].kv, 1 - self.points[-1].kv

    def reached_text(self, tolerance: float) -> str:
        """Write the compression reached; if the curve left the tolerance earlier and came back, that too."""
        if tolerance not in self.edges:
            return f"{', '.join(self.zero)}: 0 uncompressed" if self.zero else "" if self.reference else NO_REFERENCE
        reached = self.edges[tolerance]
        return f"{reached:.4f}" + (", the whole curve" if reached == self.span[1] else "")


def area(ratios_p: Sequence[float], scores_p: Sequence[float]) -> float:
    """Return the trapezoid area under the scores over its width, in units of the scores."""
    return float(np.trapezoid(scores_p, ratios_p) / (ratios_p[-1] - ratios_p[0]))


def within(ratios_p: Sequence[float], losses_p: Sequence[float], tolerance: float) -> float | None:
    """Find the largest r with a loss within ``tolerance`` on the piecewise linear curve; None where all is above."""
    crossings = [
        r + (tolerance - loss) / (next_loss - loss) * (next_r - r)
        for r, next_r, loss, next_loss in zip(ratios_p, ratios_p[1:], losses_p, losses_p[1:], strict=False)
        if (loss <= tolerance) != (next_loss <= tolerance)
    ]
    crossings += [ratios_p[-1]] if losses_p[-1] <= tolerance else []
    return float(crossings[-1]) if crossings else None


def make_curves(arms: Sequence[ArmResults]) -> list[Curve]:
    """Make a curve per method with a measured region; a second arm of one method and budget gets its own."""
    families: dict[tuple[str, str], list[ArmResults]] = defaultdict(list)
    for arm in filter(lambda arm: arm.compressed, arms):
        words = method_words(arm)
        budgets = [other.facts.nominal_kv for other in families[arm.facts.backbone, words]]
        families[arm.facts.backbone, f"{words}: {arm.name}" if arm.facts.nominal_kv in budgets else words].append(arm)
    curves = [_curve(*key, members, arms) for key, members in sorted(families.items()) if members]
    return [curve for curve in curves if curve is not None]


def method_words(arm: ArmResults) -> str:
    """Name what the arms of one curve share: all but the routers' bytes and the eviction's budget, or the reducer's."""
    facts = arm.facts
    reducer = facts.reducer if facts.eviction != "-" else facts.reducer.split()[0]
    both = AMOUNT.sub("", facts.groups), AMOUNT.sub("", facts.eviction)
    parts = [part for part in (reducer, *both) if part != "-"]
    words, notes = " + ".join(parts) or "uncompressed", tables.method_notes(facts)
    return f"{words} ({', '.join(notes)})" if notes else words


def _curve(backbone: str, name: str, members: list[ArmResults], arms: Sequence[ArmResults]) -> Curve | None:
    facts = members[0].facts
    full = [arm for arm in arms if not arm.compressed and arm.facts.backbone == facts.backbone]
    same = [arm for arm in full if arm.facts.adapter == facts.adapter]
    alike = [arm for arm in full if (arm.facts.adapter is None) == (facts.adapter is None)]
    nearest = same or alike or full  # of the members' adapter, else with or without one as they
    reference = nearest[0] if len(nearest) == 1 else None
    chosen = [*([] if reference is None else [reference]), *members]
    tasks = tuple(task for task in chosen[0].runs if all(_usable(arm, task) for arm in chosen))
    scored: list[tuple[str, str | None]] = []  # the subtasks that all runs have, else the task as a whole
    for task in tasks:
        runs = [run for arm in chosen for run in arm.answered(task).values()]
        shared = [name for name in runs[0].subtasks if all(name in run.subtasks for run in runs)]
        scored += [(task, name) for name in shared] or [(task, None)]
    points = []
    for arm in chosen:
        kv, score = tables.cost_of(arm, tasks).shares["with_index"], tables.score_of(arm, tasks) if tasks else None
        pairs = [] if reference is None else [(_value(reference, *each), _value(arm, *each)) for each in scored]
        known = pairs and all(full for full, _ in pairs)
        loss = float(np.mean([(full - mine) / full for full, mine in pairs])) if known else None
        points += [] if kv is None or score is None else [Point(arm, kv, score, loss)]
    if all(point.arm is reference for point in points):
        return None
    points.sort(key=lambda point: -point.kv)
    ratios, scores = [1 - point.kv for point in points], [point.estimate.value for point in points]
    losses = [point.loss for point in points if point.loss is not None]
    found = {tolerance: within(ratios, losses, tolerance) for tolerance in TOLERANCES if len(losses) == len(points)}
    zero = [] if reference is None else [each for each in scored if not _value(reference, *each)]
    scored_names, zero_names = (tuple("/".join(filter(None, each)) for each in part) for part in (scored, zero))
    return Curve(
        backbone, name, tasks, tuple(points), reference is not None, scored_names, zero_names,
        area(ratios, scores) if ratios[-1] > ratios[0] else None,
        {tolerance: edges for tolerance, edges in found.items() if edges is not None},
    )  # fmt: skip


def _value(arm: ArmResults, task: str, name: str | None) -> float:
    part = tables.score_part(arm, task, name)
    assert part is not None  # _usable
    return part.value


def _usable(arm: ArmResults, task: str) -> bool:
    """Tell whether the score is an accuracy; the share of answers for a judge is not."""
    part, runs = tables.score_part(arm, task), arm.runs.get(task, {}).values()
    judged = any(run.manifest.primary == Answered.names[0] for run in runs)
    return part is not None and part.form == "fraction" and not judged
