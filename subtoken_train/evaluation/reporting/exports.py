"""The report as CSV in long format: a row per arm, task and score; nothing is rounded away."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from subtoken_train.evaluation.reporting.estimates import Figure, figure_of, score_part
from subtoken_train.evaluation.reporting.report import Report
from subtoken_train.evaluation.reporting.score_tables import MEANS, Row
from subtoken_train.evaluation.reporting.sections import query_aware_text

HEADINGS = (
    "arm",
    "backbone",
    "adapter",
    "reducer",
    "groups",
    "eviction",
    "query_aware",
    "acts",
    "trained",
    "seeds",
    "kv_nominal",
    "kv_measured",
    "kv_with_index",
    "kv_prompt",
    "anchor",
    "task",
    "score",
    "unit",
    "value",
    "low",
    "high",
    "standard_error",
    "n",
    "difference",
    "difference_low",
    "difference_high",
    "difference_n",
    "marks",
)
"""Fractions are fractions here, not %. ``score`` is the task's own name of it; ``kind:NAME`` for a question kind."""


def report_csv(report: Report) -> str:
    """All scores of all arms; costs are those of the table that holds the task."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(HEADINGS)
    for table in report.tables:
        for row in table.rows:
            facts = _facts(row)
            writer.writerows([*facts, *cells] for column in table.columns for cells in _scores(row, column, report))
    return buffer.getvalue()


def _facts(row: Row) -> list[str]:
    facts = row.arm.facts
    texts = (row.arm.name, facts.backbone, facts.adapter or "", facts.reducer, facts.groups, facts.eviction)
    return [
        *map(text_cell, texts),
        query_aware_text(row.arm),
        text_cell(facts.acts),
        "yes" if facts.trained else "no",
        " ".join(map(str, row.arm.seeds)),
        _number(facts.nominal_kv),
        _number(row.cost.payload_share),
        _number(row.cost.region_share),
        _number(row.cost.prompt_share),
        text_cell(facts.anchor or ""),
    ]


def _scores(row: Row, column: str, report: Report) -> Iterator[list[str]]:
    """The cells of a column: the printed score first, then the task's other ones, then its kinds."""
    figure = row.scores[column]
    if figure is None:
        return
    if column in MEANS:
        yield _cells(column, "mean", figure, row.differences.get(column))
        return
    runs = [run for run in row.arm.runs[column].values() if run.ids]
    primary = runs[0].manifest.primary
    yield _cells(column, primary, figure, row.differences.get(column))
    for name in runs[0].scores:
        everywhere = name != primary and all(name in run.scores for run in runs)  # limited runs lack some of MME's
        part = score_part(row.arm, column, name) if everywhere else None
        if part is not None:
            yield _cells(column, name, figure_of([part]), None)
    for kinds in report.kinds:
        if kinds.task == column:
            for kind, its in kinds.arms.get(row.arm.name, {}).items():
                yield _cells(column, f"kind:{kind}", its, None)


def _cells(task: str, score: str, figure: Figure, difference: Figure | str | None) -> list[str]:
    numbers = [figure.value, figure.low, figure.high, figure.error]
    paired = difference if isinstance(difference, Figure) else None
    apart = [difference] if isinstance(difference, str) else [] if paired is None else paired.marks
    its = ["", "", "", ""]
    if paired is not None:
        its = [*map(_number, (paired.value, paired.low, paired.high)), str(paired.n)]
    notes = "; ".join([*figure.marks, *(f"difference: {words}" for words in apart)])
    return [task, text_cell(score), figure.form, *map(_number, numbers), str(figure.n), *its, text_cell(notes)]


def text_cell(text: str) -> str:
    """A text that no spreadsheet takes for a formula: a quotation mark goes before what could begin one."""
    return f"'{text}" if text != "-" and text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"
