r"""The report for other programs: CSV, LaTeX tables for ``\input`` where ``booktabs`` is loaded, and Markdown.

The CSV is in long format, a row per arm, task and score; nothing is rounded away.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from subtoken_train.evaluation.reporting import report as told
from subtoken_train.evaluation.reporting import score_tables as tables

TEXTS = ("arm", "backbone", "adapter", "reducer", "groups", "eviction", "query_aware", "acts", "trained", "seeds")
"""Facts of an arm in a row; ``query_aware`` is said of its answers to the row's task."""
NUMBERS = ("kv_nominal", "kv_measured", "kv_with_index", "kv_prompt")
SCORES = ("value", "low", "high", "standard_error", "n")
DIFFERENCES = ("difference", "difference_low", "difference_high", "difference_n")
HEADINGS = (*TEXTS, *NUMBERS, "anchor", "task", "score", "unit", *SCORES, *DIFFERENCES, "marks")
"""Fractions are fractions here, not %. ``score`` is the task's own name of it; ``kind:NAME`` for a question kind."""
SPREAD = "kv_measured_deviation"
"""Column behind these where an arm has a threshold: standard deviation over samples of its ``kv_measured``."""
PAPER = "paper"
"""Last column where a grid has a paper's numbers: that of the row's score, in its unit."""
KINDS = {
    **dict.fromkeys(HEADINGS, object), **dict.fromkeys((*NUMBERS, *SCORES, *DIFFERENCES), "float64"),
    **dict.fromkeys(("n", "difference_n"), "Int64"),
}  # fmt: skip
"""Heading -> what the column holds, in pandas' words; numbers may be missing."""


def report_csv(report: told.Report) -> str:
    """Return all scores of all arms; costs are those of the table that holds the task."""
    rows = [
        {**_facts(row, column), **cells}
        for table in report.tables
        for row in table.rows
        for column in table.columns
        for cells in _scores_of(row, column, report.kinds)
    ]
    arms = [row for table in report.tables for row in table.rows]
    there = {SPREAD: any(row.arm.facts.by_threshold for row in arms), PAPER: any(row.printed for row in arms)}
    further = [name for name, wanted in there.items() if wanted]
    frame = pd.DataFrame(rows, columns=[*HEADINGS, *further], dtype=object)
    return frame_csv(frame.astype(KINDS | dict.fromkeys(further, "float64")))


def frame_csv(frame: pd.DataFrame) -> str:
    """Return a frame as CSV with columns of ``HEADINGS``, each of its kind in ``KINDS``, and perhaps two more."""
    return str(frame.to_csv(index=False, float_format="%.6f", lineterminator="\n"))


def _facts(row: tables.ArmRow, column: str) -> dict[str, object]:
    facts, cost = row.arm.facts, row.cost
    aware = told.query_aware_text(row.arm, None if column in tables.MEANS else column)
    methods = (facts.reducer, facts.groups, facts.eviction, aware, facts.acts)
    texts = (row.arm.name, facts.backbone, facts.adapter or "", *methods, "yes" if facts.trained else "no")
    shares = (facts.nominal_kv, cost.shares["measured"], cost.shares["with_index"], cost.shares["prompt"])
    return {
        **dict(zip(TEXTS, [*map(text_cell, texts), " ".join(map(str, row.arm.seeds))], strict=True)),
        **dict(zip(NUMBERS, shares, strict=True)),
        "anchor": text_cell(facts.anchor or ""),
        SPREAD: cost.spread if facts.by_threshold else None,
    }


def _scores_of(row: tables.ArmRow, column: str, kinds: tuple[tables.KindScores, ...]) -> Iterator[dict[str, object]]:
    """Yield the cells of a column: the printed score first, then the task's other ones, then its kinds."""
    if (printed := row.scores[column]) is None:
        return
    runs = [] if column in tables.MEANS else list(row.arm.answered(column).values())
    primary = runs[0].manifest.primary if runs else "mean"
    paper = row.printed.get(column, math.nan) / (100 if printed.form == "fraction" else 1)
    yield _cells(column, primary, printed, row.differences.get(column)) | {PAPER: paper}
    for name in list(runs[0].scores) if runs else []:
        everywhere = name != primary and all(name in run.scores for run in runs)  # limited runs lack some of MME's
        part = tables.score_part(row.arm, column, name) if everywhere else None
        if part is not None:
            yield _cells(column, name, tables.estimate_of([part]))
    for scores in (part for part in kinds if part.task == column):
        for kind, estimate in scores.arms.get(row.arm.name, {}).items():
            yield _cells(column, f"kind:{kind}", estimate)


def _cells(
    task: str, score: str, its: tables.Estimate, difference: tables.Estimate | str | None = None
) -> dict[str, object]:
    paired = difference if isinstance(difference, tables.Estimate) else None
    apart = [difference] if isinstance(difference, str) else [] if paired is None else paired.marks
    notes = "; ".join([*its.marks, *(f"difference: {words}" for words in apart)])
    cells: dict[str, object] = {"task": task, "score": text_cell(score), "unit": its.form, "marks": text_cell(notes)}
    cells |= zip(SCORES, (its.value, its.low, its.high, its.error, its.n), strict=True)
    if paired is not None:
        cells |= zip(DIFFERENCES, (paired.value, paired.low, paired.high, paired.n), strict=True)
    return cells


def text_cell(text: str) -> str:
    """Return a text that no spreadsheet takes for a formula: a quotation mark goes before what could begin one."""
    return f"'{text}" if text != "-" and text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", **{character: f"\\{character}" for character in "&%$#_{}"},
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "Δ": r"$\Delta$", "†": r"\dag{}",
}  # fmt: skip
_LATEX_SPECIAL = re.compile("|".join(map(re.escape, _LATEX_ESCAPES)))


def report_latex(report: told.Report) -> str:
    """Return all score tables."""
    blocks = [r"% \usepackage{booktabs,xcolor}"]
    for part in (part for part in told.sections(report) if isinstance(part.about, tables.ScoreTable)):
        frame = part.written(_latex_cell).rename(columns=latex_escape)
        how: dict[str, Any] = {"column_format": f"l{'r' * (frame.shape[1] - 1)}", "caption": latex_escape(part.title)}
        text = frame.style.hide(axis="index").to_latex(**how, position_float="centering", hrules=True)
        blocks.append(str(text).rstrip())
    return "\n\n".join(blocks) + "\n"


def _latex_cell(cell: told.Cell, samples: int) -> str:
    if not isinstance(cell, tables.Estimate):
        return "--" if cell is None else latex_escape(cell)
    number = latex_escape(cell.value_text)
    words = " ".join(filter(None, [cell.interval_text if cell.signed else "", cell.remark(samples)]))
    text = (f"${number}$" if cell.signed else number) + (rf" {{\scriptsize {latex_escape(words)}}}" if words else "")
    return rf"\textcolor{{gray}}{{{text}}}" if cell.moot else text


def latex_escape(text: str) -> str:
    """Escape text so that LaTeX prints it as it is; one pass, so that nothing is escaped twice."""
    return _LATEX_SPECIAL.sub(lambda found: _LATEX_ESCAPES[found[0]], " ".join(text.split()))


_MARKDOWN_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")


def report_markdown(report: told.Report) -> str:
    """Return all tables of the report; charts and pictures are in the HTML page."""
    blocks = ["# Matched-budget report", *_markdown_list(told.verdicts(report)), *_markdown_list(told.NOTES)]
    for part in told.sections(report):
        frame = part.written(lambda cell, samples: markdown_escape(told.cell_text(cell, samples) if cell != "" else ""))
        header = [markdown_escape(name) for name in frame.columns]
        rows = [header, ["---"] * len(header), *frame.to_numpy().tolist()]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        blocks += [f"{'#' * part.level} {markdown_escape(part.title)}", table, *_markdown_list(part.notes)]
    return "\n\n".join(blocks) + "\n"


def markdown_escape(text: str) -> str:
    """Escape text so that Markdown prints it as it is."""
    return _MARKDOWN_SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _markdown_list(lines: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {markdown_escape(line)}" for line in lines)] if lines else []
