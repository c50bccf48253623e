"""The report as Markdown."""

from __future__ import annotations

import re

from subtoken_train.evaluation.reporting.report import Report
from subtoken_train.evaluation.reporting.sections import NOTES, Cell, Section, cell_text, sections, verdicts

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~])")


def report_markdown(report: Report) -> str:
    """All tables of the report; charts and pictures are in the HTML page."""
    blocks = ["# Matched-budget report", *_list(verdicts(report)), *_list(NOTES)]
    return "\n\n".join([*blocks, *(block for part in sections(report) for block in _blocks(part))]) + "\n"


def markdown_escape(text: str) -> str:
    """Text that Markdown prints as it is."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _blocks(part: Section) -> list[str]:
    frame = part.written(_cell)
    header = [markdown_escape(name) for name in frame.columns]
    rows = [header, ["---"] * len(header), *frame.to_numpy().tolist()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return [f"{'#' * part.level} {markdown_escape(part.title)}", table, *_list(part.notes)]


def _cell(cell: Cell, samples: int) -> str:
    return markdown_escape(cell_text(cell, samples) if cell != "" else "")


def _list(lines: tuple[str, ...] | list[str]) -> list[str]:
    return ["\n".join(f"- {markdown_escape(line)}" for line in lines)] if lines else []
