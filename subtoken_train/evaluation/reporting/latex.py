r"""The tables as LaTeX, for ``\input`` in a document that loads ``booktabs``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from subtoken_train.evaluation.reporting.estimates import Figure
from subtoken_train.evaluation.reporting.report import Report
from subtoken_train.evaluation.reporting.score_tables import Row, Table
from subtoken_train.evaluation.reporting.sections import (
    comparison_rows,
    interval_text,
    remark_text,
    share_text,
    signed_text,
    value_text,
)

ESCAPES = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "Δ": r"$\Delta$",
}
SPECIAL = re.compile("|".join(map(re.escape, ESCAPES)))


def report_latex(report: Report) -> str:
    """All score tables, and the comparison with printed rows where there is one."""
    blocks = [r"% \usepackage{booktabs}", *map(_scores, report.tables)]
    for comparison in report.comparisons:
        header, rows = comparison_rows(comparison)
        caption = f"{comparison.arm}: {comparison.words}"
        blocks.append(_table(caption, header, [[escape(cell) for cell in row] for row in rows]))
    return "\n\n".join(blocks) + "\n"


def escape(text: str) -> str:
    """Text that LaTeX prints as it is; one pass, so that nothing is escaped twice."""
    return SPECIAL.sub(lambda found: ESCAPES[found[0]], " ".join(text.split()))


def _scores(table: Table) -> str:
    columns = list(table.columns)
    header = ["arm", "KV nominal", "KV measured", "query-aware", *table.columns.values()]
    counts = ["$n$", "", "", "", *(f"{table.samples[column]:,}" for column in columns)]
    rows = [counts]
    for row in table.rows:
        rows.append([*_facts(row), *(_score(row.scores[key], table.samples[key]) for key in columns)])
        if row.anchor is not None:
            cells = [_difference(row.differences[key], table.samples[key]) for key in columns]
            rows.append([rf"\quad $\Delta$ to {escape(row.anchor.name)}", "", "", "", *cells])
    return _table(table.title, header, rows)


def _facts(row: Row) -> list[str]:
    aware = "yes" if row.arm.facts.protocol == "query_aware" else "no"
    return [
        escape(row.arm.name),
        *map(escape, map(share_text, (row.arm.facts.nominal_kv, row.cost.payload_share))),
        aware,
    ]


def _score(figure: Figure | None, samples: int) -> str:
    return "--" if figure is None else value_text(figure) + _small(remark_text(figure, samples))


def _difference(figure: Figure | str | None, samples: int) -> str:
    if figure is None or isinstance(figure, str):
        return "--" + _small(figure or "")
    words = " ".join(filter(None, [interval_text(figure, sign=True), remark_text(figure, samples)]))
    return f"${signed_text(figure)}$" + _small(words)


def _small(words: str) -> str:
    return rf" {{\scriptsize {escape(words)}}}" if words else ""


def _table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """``rows`` are LaTeX already, ``caption`` and ``header`` are not."""
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escape(caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
        r"\toprule",
        " & ".join(map(escape, header)) + r" \\",
        r"\midrule",
        *(" & ".join(row) + r" \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines)
