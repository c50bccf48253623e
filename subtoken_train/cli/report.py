"""``subtoken-train report``: tables and curves from results folders."""

import argparse
import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from subtoken_train.cli.terminal import counter
from subtoken_train.documents import read_json
from subtoken_train.errors import check_package, check_word, plain
from subtoken_train.outputs import check_new, write_whole

if TYPE_CHECKING:
    from subtoken_train.evaluation.reporting.report import Report

FILES = {"markdown": "report.md", "csv": "report.csv", "latex": "report.tex", "html": "report.html"}
_RECORD = ".written.json"

HELP = """Tables and curves from the results folders of 'subtoken-train evaluate'.

Scores are recomputed from the stored answers. Several folders may have different tasks, arms or seeds; arms whose names
differ only in 'seedN' are shown as one, with the spread between seeds in its interval. Every arm is compared with its
matched token-only anchor, sample by sample. The HTML page is a single file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", metavar="RESULTS", help="results or run folders (ARM/TASK/manifest.json)")
    parser.add_argument("--out", metavar="DIR", help="folder for the files (default: report in the first RESULTS)")
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    all_files = ",".join(FILES)
    which = f"which files to write (default: {all_files})"
    parser.add_argument("--format", default=all_files, metavar="A,B", help=which)


def run(args: argparse.Namespace) -> int:
    formats = [name.strip() for name in args.format.split(",")]
    for name in formats:
        check_word("format", name, FILES)
    if "html" in formats:
        check_package("matplotlib", "report", FILES["html"], "write the others: --format markdown,csv,latex")
    folders = [path / "compare" if (path / "compare/grid.yaml").is_file() else path for path in map(Path, args.results)]
    for path in filter(Path.is_file, folders):
        read = "report reads the folders that --tasks, --config and --suite write"
        raise ValueError(f"{path} is a file, as 'subtoken-train evaluate --data --out' writes one; {read}")
    if empty := [folder for folder in folders if not any(folder.glob("*/*/manifest.json"))]:  # before heavy imports
        raise ValueError(f"{empty[0]} holds no results; make them first: subtoken-train evaluate --out {empty[0]} ...")
    out = Path(args.out) if args.out else folders[0] / "report"
    print_summary(write_report(folders, out, formats, args.overwrite, bool(args.out)))
    print(f"{', '.join(FILES[name] for name in formats)} written to {out}")
    return 0


def write_report(
    folders: list[Path],
    out: Path,
    formats: Collection[str] = tuple(FILES),
    overwrite: bool = False,
    named: bool = False,
) -> "Report":
    """Work out and write a report; an earlier one is written anew where nobody changed it and ``out`` was not named."""
    content = read_json(out / _RECORD) if (out / _RECORD).is_file() else {}
    files, written = {out / FILES[name]: name for name in formats}, content if isinstance(content, dict) else {}
    there = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file() and not named}
    check_new([path for path in files if path not in there or there[path] != written.get(path.name)], overwrite)
    from subtoken_train.evaluation.reporting import exports
    from subtoken_train.evaluation.reporting.report import make_report

    report = make_report(folders, counter("runs scored"))
    write = {"markdown": exports.report_markdown, "csv": exports.report_csv, "latex": exports.report_latex}
    if "html" in formats:  # the only one that draws
        from subtoken_train.evaluation.reporting.page import report_html

        write["html"] = report_html
    texts = {path: write[name](report) for path, name in files.items()}
    for path, text in texts.items():
        write_whole(path, text)
    digests = {path.name: hashlib.sha256(text.encode()).hexdigest() for path, text in texts.items()}
    write_whole(out / _RECORD, json.dumps({**written, **digests}, indent=1) + "\n")
    return report


def print_summary(report: "Report") -> None:
    """Print a table of all arms, and what is wrong with any of them."""
    from subtoken_train.benchmarking.comparison import aligned_columns
    from subtoken_train.evaluation.reporting.report import NOTHING, measured_text, nominal_text
    from subtoken_train.evaluation.reporting.score_tables import MEANS, Estimate

    for scores in report.tables:
        shown = [key for key in scores.columns if any(row.scores[key] for row in scores.rows)]
        means = [key for key in shown if key in MEANS]
        if means and all(any(row.scores[key] for key in means) for row in scores.rows):
            shown = means
        words = "fractions in %; second lines: KV measured, difference to the anchor. Intervals and n are in the files"
        if any(figure is not None and figure.marks for row in scores.rows for figure in row.scores.values()):
            words += ". *: incomplete or partial"
        lines = [["arm", "KV nominal", *(scores.columns[key] for key in shown)]]
        for row in scores.rows:
            figures = [row.scores[key] for key in shown]
            values = [NOTHING if each is None else each.value_text + ("*" if each.marks else "") for each in figures]
            apart = [row.differences.get(key) for key in shown]
            lines.append([plain(row.arm.name), nominal_text(row.arm.facts), *values])
            lines.append(["", measured_text(row), *(x.value_text if isinstance(x, Estimate) else "" for x in apart)])
        print(scores.title, *aligned_columns(lines), words, sep="\n")
    flags = (f"{row.arm.name}: {flag}" for table in report.tables for row in table.rows for flag in row.flags)
    for flag in dict.fromkeys(flags):
        print(flag)
