"""Scores per question kind, from the samples' own scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from subtoken_train.evaluation.reporting.estimates import Estimate, Part, estimate_of, marks, sample_table, shared_ids
from subtoken_train.evaluation.reporting.runs import ArmResults, Run

MAX_ARMS = 8
"""Arms in one chart; the CSV file has all."""


@dataclass(frozen=True)
class KindScores:
    """One task's kinds.

    Attributes:
        task: its name.
        kinds: in order of their first samples.
        arms: arm's name -> kind -> mean of the samples' scores; a kind without samples is left out.
        drawn: the arms that a chart shows: of more than ``MAX_ARMS`` those with an anchor and the anchors first.
    """

    task: str
    kinds: tuple[str, ...]
    arms: dict[str, dict[str, Estimate]]
    drawn: tuple[str, ...]


def make_kinds(arms: Sequence[ArmResults]) -> list[KindScores]:
    """All tasks with more kinds than one whose samples have scores in 0..1."""
    tasks = {task: None for arm in arms for task in arm.runs}
    found = [_of_task(task, arms) for task in tasks]
    return [kinds for kinds in found if len(kinds.kinds) > 1]


def _of_task(task: str, arms: Sequence[ArmResults]) -> KindScores:
    estimates: dict[str, dict[str, Estimate]] = {}
    order: dict[str, None] = {}
    for arm in arms:
        runs = [run for run in arm.runs.get(task, {}).values() if run.ids]
        if runs and all(((run.scores_n >= 0) & (run.scores_n <= 1)).all() for run in runs):
            order |= {kind: None for run in runs for kind in run.kinds}
            estimates[arm.name] = _of_arm(runs, arm.is_moot(task))
    anchors = {arm.facts.anchor for arm in arms}
    compared = {arm.name for arm in arms if arm.facts.anchor is not None or arm.name in anchors}
    first = sorted(estimates, key=lambda name: name not in compared)[:MAX_ARMS]
    return KindScores(task, tuple(order), estimates, tuple(name for name in estimates if name in first))


def _of_arm(runs: Sequence[Run], moot: bool) -> dict[str, Estimate]:
    """The kinds' means over samples and seeds; a sample counts where every seed answered it."""
    kind_of = dict(zip(runs[0].ids, runs[0].kinds, strict=True))
    kinds = np.array([kind_of[name] for name in shared_ids(runs)])
    table_sn = sample_table(runs)
    estimates = {}
    for kind in dict.fromkeys(kinds.tolist()):
        part_sn = table_sn[:, kinds == kind]
        plain = Estimate(float(part_sn.mean()), None, None, None, part_sn.shape[1], marks=marks(runs), moot=moot)
        estimates[kind] = estimate_of([Part(plain, part_sn)])
    return estimates
