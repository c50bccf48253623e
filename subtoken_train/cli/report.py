"""``subtoken-train report``: tables, curves and pictures from results folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from subtoken_train.errors import unknown_name

if TYPE_CHECKING:
    from rich.table import Table

    from subtoken_train.evaluation.reporting.report import Report

FILES = {"markdown": "report.md", "csv": "report.csv", "latex": "report.tex", "html": "report.html"}
PAPER_FILE = "paper_tables.json"

HELP = """Tables, curves and pictures from the results folders of 'subtoken-train evaluate'.

Scores are computed anew from the stored answers. Several folders may hold other tasks, arms or seeds; arms whose names
differ only in 'seedN' are shown as one, with the spread between seeds in its intervals. Every arm is compared with its
matched token-only anchor, sample by sample. The HTML page is one file that needs no other."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="results folders (ARM/TASK/manifest.json)")
    parser.add_argument("--out", metavar="DIR", help="folder for the files (default: report in the first RESULTS)")
    parser.add_argument(
        "--format",
        default=",".join(FILES),
        metavar="A,B",
        help=f"which files to write (default: {','.join(FILES)})",
    )
    parser.add_argument(
        "--compare-paper",
        nargs="?",
        const=PAPER_FILE,
        metavar="FILE",
        help=f"JSON file of the paper's printed tables, shown beside ours (default: {PAPER_FILE})",
    )
    parser.add_argument(
        "--data-root",
        metavar="DIR",
        help="folder with a folder of files per task, for questions and pictures (default: where each task was read)",
    )


def run(args: argparse.Namespace) -> int:
    """Read, work out, write and print."""
    formats = [name.strip() for name in args.format.split(",")]
    for name in formats:
        if name not in FILES:
            raise unknown_name("format", name, FILES)
    data_root = None if args.data_root is None else Path(args.data_root)
    if data_root is not None and not data_root.is_dir():
        raise ValueError(f"--data-root {data_root} is no folder")
    from subtoken_train.evaluation.reporting.report import make_report

    folders = [Path(name) for name in args.results]
    paper = None if args.compare_paper is None else Path(args.compare_paper)
    report = make_report(folders, paper, data_root)
    out = Path(args.out) if args.out else folders[0] / "report"
    out.mkdir(parents=True, exist_ok=True)
    for name in formats:
        (out / FILES[name]).write_text(_writer(name)(report), encoding="utf-8")
    print_summary(report)
    if paper is not None and not report.comparisons:
        print(f"no arm has the backbone, reducer and groups of a row of {paper}")
    print(f"{', '.join(FILES[name] for name in formats)} written to {out}")
    return 0


def _writer(name: str) -> Callable[[Report], str]:
    from subtoken_train.evaluation.reporting.csv_file import report_csv
    from subtoken_train.evaluation.reporting.latex import report_latex
    from subtoken_train.evaluation.reporting.markdown import report_markdown
    from subtoken_train.evaluation.reporting.page import report_html

    return {"markdown": report_markdown, "csv": report_csv, "latex": report_latex, "html": report_html}[name]


def print_summary(report: Report) -> None:
    """A table of all arms, and what is wrong with any of them."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 120).print(_summary(report))
    for table in report.tables:
        for row in table.rows:
            for flag in row.flags:
                print(f"{row.arm.name}: {flag}")


def _summary(report: Report) -> Table:
    """Budget, score and difference of every arm: its means where it has them, else its tasks."""
    from rich.table import Table

    from subtoken_train.evaluation.reporting.layout import MEANS
    from subtoken_train.evaluation.reporting.words import difference_text, score_text, share_text

    summary = Table("arm", "KV nominal", "KV region", "", "score, %", "Δ to the anchor", "n")
    for table in report.tables:
        for row in table.rows:
            figures = {key: figure for key, figure in row.scores.items() if figure is not None}
            means = {key: figure for key, figure in figures.items() if key in MEANS}
            head = [row.arm.name, share_text(row.arm.facts.nominal_kv), share_text(row.cost.region_share)]
            for key, figure in (means or figures).items():
                apart = difference_text(row.differences.get(key), figure.n)
                summary.add_row(*head, table.columns[key], score_text(figure, figure.n), apart, f"{figure.n:,}")
                head = [""] * len(head)
    return summary
