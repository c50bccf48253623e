"""README's table and plot of the mini-suite.

subtoken-train evaluate --suite mini --out results/mini
python benchmarks/mini_suite.py results/mini      # benchmarks/results/mini_suite.csv and .svg, and README's table
python benchmarks/mini_suite.py                   # README's table from the committed CSV
"""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path

from markupsafe import Markup

from subtoken_train.evaluation.reporting.estimates import Figure
from subtoken_train.evaluation.reporting.exports import report_csv
from subtoken_train.evaluation.reporting.kinds import KindScores
from subtoken_train.evaluation.reporting.plots import kind_chart
from subtoken_train.evaluation.reporting.report import Report, make_report

ROOT = Path(__file__).resolve().parents[1]
CSV_FILE, SVG_FILE = (ROOT / "benchmarks/results" / f"mini_suite.{suffix}" for suffix in ("csv", "svg"))
START, END = "<!-- mini:start -->", "<!-- mini:end -->"
SCENES = tuple(f"scenes_{style}" for style in ("pope", "textvqa", "gqa", "mmbench", "caption"))
ARMS = {
    "tiny_lora_only": "no compression",
    "tiny_fastv25_s16k4_anchor": "FastV 15.6 %, the anchor",
    "tiny_fastv25_s16k4": "FastV 25 % + S16K4 router",
    "tiny_fastv25_s16k4-value_norm": "the same, groups by value norm, untrained",
    "tiny_fastv25_s16k4-random": "the same, groups at random, untrained",
    "tiny_lora_only-aircache0.15625_visual": "AirCache 15.6 %",
    "tiny_none100_s16k4-aircache0.25_visual": "AirCache 25 % + S16K4 router",
    "tiny_lora_only-snapkv0.15625_visual": "SnapKV 15.6 %",
    "tiny_lora_only-snapkv0.15625_visual-context_first": "SnapKV 15.6 %, context first",
    "tiny_lora_only-kvcompose0.15625_visual-context_first": "KVCompose 15.6 %, context first",
    "tinylm_lora_only": "no compression",
    "tinylm_quest25_s8k6_anchor": "Quest 21.9 %, the anchor",
    "tinylm_quest25_s16k12": "Quest 25 % + S16K12 router",
    "tinylm_quest25_s16k12-value_norm": "the same, groups by value norm, untrained",
    "tinylm_quest25_s16k12-random": "the same, groups at random, untrained",
    "tinylm_lora_only-snapkv0.21875": "SnapKV 21.9 %",
    "tinylm_lora_only-snapkv0.21875-context_first": "SnapKV 21.9 %, context first",
    "tinylm_lora_only-kvcompose0.21875-context_first": "KVCompose 21.9 %, context first",
}
"""Arm -> words of its row, in the table's order."""
STYLE = (
    "text{fill:#5c6672;font:13px system-ui,sans-serif}polyline{fill:none}.grid{stroke:#dfe3e8}.axis{stroke:#5c6672}"
    ".thin{stroke:#1d2127}.c0{fill:#1f5fa8}.c1{fill:#c8541b}.c2{fill:#2f8a4c}.c3{fill:#8a4fa3}.c4{fill:#b08a00}"
    ".c5{fill:#1796a3}.c6{fill:#c23b72}.c7{fill:#6b7480}"
)


def table(rows: list[dict[str, str]]) -> str:
    """README's tables from the report's CSV: scores in %, and 95 % intervals of the difference to the anchor."""
    found = {(row["arm"], row["task"]): row for row in rows if row["score"] == "score"}
    parts = [_part(found, "tiny_", SCENES), _part(found, "tinylm_", ("recall",))]
    return "\n\n".join(parts)


def _part(found: dict[tuple[str, str], dict[str, str]], prefix: str, tasks: tuple[str, ...]) -> str:
    lines = [f"| arm | query aware | KV nominal | with index | {' | '.join(tasks)} |", "|---" * (len(tasks) + 4) + "|"]
    for arm, words in ARMS.items():
        if arm.startswith(prefix):
            row = found[arm, tasks[0]]
            cells = [row["query_aware"], f"{float(row['kv_nominal']):.3%}", f"{float(row['kv_with_index']):.3%}"]
            cells += [_cell(found[arm, task]) for task in tasks]
            lines.append(f"| {words} | {' | '.join(cells)} |")
    counts = ", ".join(f"{found[next(a for a in ARMS if a.startswith(prefix)), task]['n']} {task}" for task in tasks)
    return "\n".join([*lines, "", f"Samples: {counts}."])


def _cell(row: dict[str, str]) -> str:
    score = f"{100 * float(row['value']):.1f}"
    if not row["difference"]:
        return score
    low, high = (100 * float(row[end]) for end in ("difference_low", "difference_high"))
    return f"{score} ({100 * float(row['difference']):+.1f} [{low:+.1f}, {high:+.1f}])"


def plot(report: Report) -> str:
    """Bars per task of the arms on scenes, as an SVG file of its own."""
    arms = {words: {} for arm, words in ARMS.items() if arm.startswith("tiny_") and "snapkv" not in arm}
    for part in report.tables:
        for row in part.rows:
            if row.arm.name in ARMS and ARMS[row.arm.name] in arms and row.arm.name.startswith("tiny_"):
                scores: dict[str, Figure] = {task: row.scores[task] for task in SCENES if row.scores.get(task)}
                arms[ARMS[row.arm.name]] = scores
    drawing = kind_chart(KindScores("mini-suite", SCENES, arms, tuple(arms)))
    markup = drawing.markup("mini")
    style = Markup("<style>{}</style>").format(Markup(STYLE))
    return (
        str(markup)
        .replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        .replace("<title", f"{style}<title", 1)
    )


def main() -> None:
    """Write what is named above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="results folder of the suite")
    args = parser.parse_args()
    if args.results is not None:
        report = replace(make_report([args.results]), regressions={})
        CSV_FILE.write_text(report_csv(report), encoding="utf-8")
        SVG_FILE.write_text(plot(report), encoding="utf-8")
    readme = ROOT / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(START + "\n")
    with CSV_FILE.open(encoding="utf-8", newline="") as file:
        made = table(list(csv.DictReader(file)))
    readme.write_text(f"{before}{START}\n{made}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
