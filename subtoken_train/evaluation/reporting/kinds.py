"""Scores per question kind, from the samples' own scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from subtoken_train.evaluation.reporting.estimates import Figure, Part, figure_of, marks
from subtoken_train.evaluation.reporting.runs import Arm, Run

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
    arms: dict[str, dict[str, Figure]]
    drawn: tuple[str, ...]


def make_kinds(arms: Sequence[Arm]) -> list[KindScores]:
    """All tasks with more kinds than one whose samples have scores in 0..1."""
    tasks = {task: None for arm in arms for task in arm.runs}
    found = [_of_task(task, arms) for task in tasks]
    return [kinds for kinds in found if len(kinds.kinds) > 1]


def _of_task(task: str, arms: Sequence[Arm]) -> KindScores:
    figures: dict[str, dict[str, Figure]] = {}
    order: dict[str, None] = {}
    for arm in arms:
        runs = [run for run in arm.runs.get(task, {}).values() if run.ids]
        if not runs or not all(_are_fractions(run) for run in runs):
            continue
        order |= {kind: None for run in runs for kind in run.kinds}
        figures[arm.name] = _of_arm(runs)
    anchors = {arm.facts.anchor for arm in arms}
    compared = {arm.name for arm in arms if arm.facts.anchor is not None or arm.name in anchors}
    first = sorted(figures, key=lambda name: name not in compared)[:MAX_ARMS]
    return KindScores(task, tuple(order), figures, tuple(name for name in figures if name in first))


def _are_fractions(run: Run) -> bool:
    return bool(((run.scores_n >= 0) & (run.scores_n <= 1)).all())


def _of_arm(runs: list[Run]) -> dict[str, Figure]:
    """The kinds' means over samples and seeds; a sample counts where every seed answered it."""
    places = [{name: place for place, name in enumerate(run.ids)} for run in runs]
    shared = [name for name in runs[0].ids if all(name in place for place in places)]
    kinds = np.array([runs[0].kinds[places[0][name]] for name in shared])
    table_sn = np.stack(
        [run.scores_n[[place[name] for name in shared]] for run, place in zip(runs, places, strict=True)]
    )
    figures = {}
    for kind in dict.fromkeys(kinds.tolist()):
        part_sn = table_sn[:, kinds == kind]
        figures[kind] = figure_of([Part(float(part_sn.mean()), "fraction", part_sn, part_sn.shape[1], marks(runs))])
    return figures
