"""The report as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from subtoken_train.evaluation.reporting.kinds import KindScores
from subtoken_train.evaluation.reporting.report import Report
from subtoken_train.evaluation.reporting.score_tables import Table
from subtoken_train.evaluation.reporting.sections import (
    CURVE_HEADINGS,
    CURVE_NOTE,
    FACT_HEADINGS,
    NOTES,
    POINT_HEADINGS,
    TASK_HEADINGS,
    comparison_rows,
    curve_rows,
    difference_text,
    fact_cells,
    point_rows,
    score_text,
    task_cells,
)

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")


def report_markdown(report: Report) -> str:
    """All tables of the report; charts and pictures are in the HTML page."""
    blocks = ["# Matched-budget report", "\n".join(f"- {note}" for note in NOTES)]
    for table in report.tables:
        blocks += [f"## {table.title}", _scores(table), "### Budgets", _budgets(table), *_flags(table)]
    if report.curves:
        blocks += ["## Accuracy against KV", CURVE_NOTE, grid(CURVE_HEADINGS, map(_escaped, curve_rows(report.curves)))]
        blocks += [grid(POINT_HEADINGS, map(_escaped, point_rows(report.curves)))]
    blocks += [block for kinds in report.kinds for block in _kinds(kinds)]
    if report.comparisons:
        blocks.append("## Printed, recomputed, ours")
    for comparison in report.comparisons:
        header, rows = comparison_rows(comparison)
        blocks += [f"{escape(comparison.arm)}: {escape(comparison.words)}", grid(header, map(_escaped, rows))]
    blocks += ["## How the tasks were asked", grid(TASK_HEADINGS, map(_escaped, map(task_cells, report.tasks)))]
    return "\n\n".join(blocks) + "\n"


def _kinds(kinds: KindScores) -> list[str]:
    largest = {kind: max(arm[kind].n for arm in kinds.arms.values() if kind in arm) for kind in kinds.kinds}
    rows = []
    for kind, samples in largest.items():
        cells = [score_text(arm.get(kind), samples) for arm in kinds.arms.values()]
        rows.append([f"{escape(kind)} (n = {samples:,})", *cells])
    return [f"## {escape(kinds.task)} by question kind", grid(["kind", *map(escape, kinds.arms)], rows)]


def escape(text: str) -> str:
    """Text that Markdown prints as it is."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _escaped(cells: Iterable[str]) -> list[str]:
    return [escape(cell) for cell in cells]


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _scores(table: Table) -> str:
    header = ["arm", *(f"{escape(words)} (n = {table.samples[key]:,})" for key, words in table.columns.items())]
    rows = []
    for row in table.rows:
        rows.append([escape(row.arm.name), *(score_text(row.scores[key], table.samples[key]) for key in table.columns)])
        if row.anchor is not None:
            cells = [difference_text(row.differences[key], table.samples[key]) for key in table.columns]
            rows.append([f"Δ to {escape(row.anchor.name)}", *cells])
    return grid(header, rows)


def _budgets(table: Table) -> str:
    return grid(FACT_HEADINGS, [_escaped(fact_cells(row)) for row in table.rows])


def _flags(table: Table) -> list[str]:
    lines = [f"- **{escape(row.arm.name)}**: {escape(flag)}" for row in table.rows for flag in row.flags]
    return ["### Flags", "\n".join(lines)] if lines else []
