"""All that a report says, before it takes a format."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from subtoken_train.evaluation.reporting.curves import Curve, make_curves
from subtoken_train.evaluation.reporting.kinds import KindScores, make_kinds
from subtoken_train.evaluation.reporting.paper import Comparison, compare_paper
from subtoken_train.evaluation.reporting.pictures import TaskFiles
from subtoken_train.evaluation.reporting.regressions import Regression, worst_regressions
from subtoken_train.evaluation.reporting.runs import Arm, read_results
from subtoken_train.evaluation.reporting.score_tables import Table, make_tables, ordered
from subtoken_train.evaluation.results.manifest import Manifest


@dataclass(frozen=True)
class TaskFacts:
    """How a task was asked: what two reports must share to be compared."""

    task: str
    score: str
    options: str
    source: str
    samples: str
    digest: str
    arms: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The parts of a report; a part without content is empty.

    Attributes:
        arms: in the order of the tables.
        tables: scores and differences.
        tasks: how each task was asked; more than one line where arms differ in it.
        curves: accuracy against KV.
        kinds: scores per question kind.
        regressions: arm -> samples on which it falls furthest behind its anchor.
        comparisons: printed rows beside ours.
    """

    arms: tuple[Arm, ...]
    tables: tuple[Table, ...]
    tasks: tuple[TaskFacts, ...]
    curves: tuple[Curve, ...]
    kinds: tuple[KindScores, ...]
    regressions: dict[str, list[Regression]]
    comparisons: tuple[Comparison, ...]

    @property
    def task_names(self) -> list[str]:
        """All tasks, each once."""
        return list(dict.fromkeys(fact.task for fact in self.tasks))


def make_report(
    folders: Sequence[Path],
    paper: Path | None = None,
    data_root: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Read results folders and work everything out.

    Args:
        folders: of results.
        paper: file of printed tables; None: no comparison.
        data_root: folder with a folder of files per task, for pictures and questions.
        progress: called with (done, total) as runs are read and scored.

    Raises:
        ValueError: what ``read_results`` and ``compare_paper`` refuse.
    """
    arms = ordered(read_results(folders, progress))
    return Report(
        tuple(arms),
        make_tables(arms),
        tuple(_task_facts(arms)),
        tuple(make_curves(arms)),
        tuple(make_kinds(arms)),
        worst_regressions(arms, TaskFiles(data_root)),
        () if paper is None else tuple(compare_paper(arms, paper)),
    )


def _task_facts(arms: Sequence[Arm]) -> list[TaskFacts]:
    found: dict[TaskFacts, None] = {}
    for arm in arms:
        for task, runs in arm.runs.items():
            for run in runs.values():
                found[_facts_of(task, run.manifest, arm.name)] = None
    merged: dict[TaskFacts, list[str]] = {}
    for facts in found:
        merged.setdefault(replace(facts, arms=()), []).extend(facts.arms)
    return [replace(facts, arms=tuple(names)) for facts, names in sorted(merged.items(), key=lambda item: item[0].task)]


def _facts_of(task: str, manifest: Manifest, arm: str) -> TaskFacts:
    whole = "" if manifest.expected_rows is None else f" of {manifest.expected_rows:,}"
    options = json.dumps(manifest.options) if manifest.options else "-"
    samples, digest = f"{manifest.rows:,}{whole}", manifest.samples_sha256[:12]
    return TaskFacts(task, manifest.primary, options, manifest.source or "its own Hub id", samples, digest, (arm,))
