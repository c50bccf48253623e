"""The paper's layout: arms in rows, tasks in columns, means over them, each arm below its matched anchor.

Tasks outside the paper's seven make tables of their own, images apart from text, without means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from subtoken_train.evaluation.reporting.estimates import (
    Estimate,
    difference_estimate,
    mean_difference,
    mean_estimate,
    score_estimate,
)
from subtoken_train.evaluation.reporting.runs import ArmResults, Cost
from subtoken_train.evaluation.tasks import TASKS
from subtoken_train.evaluation.tasks.task import Modality

PAPER_TASKS = {
    "mmbench": "MMBench",
    "textvqa": "TextVQA",
    "gqa": "GQA",
    "pope": "POPE",
    "mme": "MME",
    "scienceqa": "SciQA",
    "vqav2": "VQAv2",
}
"""Task -> the paper's name of the column."""

MEANS = {"3-mean": ("mmbench", "textvqa", "gqa"), "7-mean": tuple(PAPER_TASKS)}
"""Declared in the paper's section 4.1; computed here, and only where all of the tasks are there."""


@dataclass(frozen=True)
class ArmRow:
    """An arm in a table.

    Attributes:
        arm: with all seeds.
        anchor: what it is compared with; None where it names none or that one is not among the results.
        scores: column -> score.
        differences: column -> arm minus anchor; words where the two cannot be paired; empty without an anchor.
        cost: of the table's tasks, all seeds together.
        anchor_ratio: measured share of KV that the anchor keeps over ours, without the index of value groups, on the
            tasks of both; None without an anchor.
        flags: what a reader must know, in words.
    """

    arm: ArmResults
    anchor: ArmResults | None
    scores: dict[str, Estimate | None]
    differences: dict[str, Estimate | str | None]
    cost: Cost
    anchor_ratio: float | None
    flags: tuple[str, ...]


@dataclass(frozen=True)
class ScoreTable:
    """Arms and columns.

    Attributes:
        title: in words.
        columns: key (task or mean) -> heading.
        samples: column -> samples that its largest cell rests on.
        rows: in the paper's order.
    """

    title: str
    columns: dict[str, str]
    samples: dict[str, int]
    rows: tuple[ArmRow, ...]


def make_tables(arms: Sequence[ArmResults]) -> tuple[ScoreTable, ...]:
    """The table of the paper's tasks, and those of all other image and text tasks, as far as there are results."""
    present = sorted({task for arm in arms for task in arm.runs})
    tables = []
    if any(task in PAPER_TASKS for task in present):
        columns = {**PAPER_TASKS, **{mean: mean for mean in MEANS}}
        tables.append(_table("Scores, the paper's layout", columns, arms))
    for modality in get_args(Modality):
        others = [task for task in present if task not in PAPER_TASKS and TASKS[task].modality == modality]
        if others:
            tables.append(_table(f"Scores, {modality} tasks", {task: task for task in others}, arms))
    return tuple(tables)


def anchor_of(arm: ArmResults, arms: Sequence[ArmResults]) -> ArmResults | None:
    """The arm that ``arm`` names as its anchor."""
    return next((other for other in arms if other.name == arm.facts.anchor), None)


def ordered(arms: Sequence[ArmResults]) -> list[ArmResults]:
    """By backbone, then uncompressed arms, then reducers with their largest budget first; an anchor above its arms."""

    def place(arm: ArmResults) -> tuple[str, bool, str, float, str, bool, str]:
        facts = (anchor_of(arm, arms) or arm).facts
        compressed = facts.acts != "-"
        block = arm.facts.anchor or arm.name
        return (
            facts.backbone,
            compressed,
            facts.reducer.split()[0],
            -facts.nominal_kv,
            block,
            arm.facts.anchor is not None,
            arm.name,
        )

    return sorted(arms, key=place)


def _table(title: str, columns: dict[str, str], arms: Sequence[ArmResults]) -> ScoreTable:
    tasks = [column for column in columns if column not in MEANS]
    shown = [arm for arm in ordered(arms) if any(task in arm.runs for task in tasks)]
    rows = tuple(_row(arm, anchor_of(arm, arms), columns, tasks) for arm in shown)
    figures = {column: [row.scores[column] for row in rows] for column in columns}
    samples = {column: max((part.n for part in parts if part), default=0) for column, parts in figures.items()}
    return ScoreTable(title, columns, samples, rows)


def _row(arm: ArmResults, anchor: ArmResults | None, columns: dict[str, str], tasks: list[str]) -> ArmRow:
    scores: dict[str, Estimate | None] = {}
    differences: dict[str, Estimate | str | None] = {}
    for column in columns:
        mean = MEANS.get(column)
        scores[column] = score_estimate(arm, column) if mean is None else mean_estimate(arm, mean)
        if anchor is not None:
            differences[column] = (
                difference_estimate(arm, anchor, column) if mean is None else mean_difference(arm, anchor, mean)
            )
    ratio = None if anchor is None else _anchor_ratio(arm, anchor, tasks)
    cost = cost_of(arm, tasks)
    return ArmRow(arm, anchor, scores, differences, cost, ratio, tuple(_flags(arm, anchor, cost, ratio, tasks)))


def cost_of(arm: ArmResults, tasks: Sequence[str]) -> Cost:
    """What the arm's caches cost on these tasks, all seeds together."""
    return sum((run.cost for task in tasks for run in arm.runs.get(task, {}).values()), Cost())


def _anchor_ratio(arm: ArmResults, anchor: ArmResults, tasks: Sequence[str]) -> float | None:
    shared = [task for task in tasks if task in arm.runs and task in anchor.runs]
    ours, its = cost_of(arm, shared).shares["measured"], cost_of(anchor, shared).shares["measured"]
    return its / ours if ours and its else None


def _flags(
    arm: ArmResults, anchor: ArmResults | None, cost: Cost, ratio: float | None, tasks: Sequence[str]
) -> list[str]:
    facts, flags = arm.facts, []
    if facts.anchor is not None and anchor is None:
        flags.append(f"its anchor {facts.anchor} has no results here")
    if anchor is not None and anchor.facts.nominal_kv < facts.nominal_kv:
        flags.append(f"the anchor keeps less: {anchor.facts.nominal_kv:.3%} of the KV against {facts.nominal_kv:.3%}")
    if ratio is not None and ratio < 1:
        flags.append(f"measured, the anchor takes {1 - ratio:.2%} fewer bytes")
    if facts.acts != "-" and cost.dense_kv_bytes and not cost.acted:
        flags.append("compression did not act: nothing left the cache")
    if cost.unread_bytes:
        read = 1 - cost.unread_bytes / cost.kv_bytes
        flags.append(f"it frees nothing: a step of decoding reads {read:.1%} of the prompts' stored KV")
    if cost.emptied:
        of = sum(len(run.ids) for task in tasks for run in arm.runs.get(task, {}).values())
        flags.append(f"nothing is left of a whole region in some layer of {cost.emptied:,} of {of:,} prompts")
    if names := ", ".join(task for task in tasks if arm.is_moot(task)):
        flags.append(f"compression after prefill cannot change a first token or a log-likelihood ({names})")
    return flags
