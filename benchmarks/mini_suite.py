"""The table of ``docs/mini_suite.md``.

subtoken-train evaluate --suite mini --out results/mini
python benchmarks/mini_suite.py results/mini      # benchmarks/results/mini_suite.csv, then as below
python benchmarks/mini_suite.py                   # from the committed CSV: the page's table
"""

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.pages import put
from benchmarks.pairs import markdown
from subtoken_train.cli.recommend import interval_cell
from subtoken_train.evaluation.reporting.exports import KINDS, report_csv
from subtoken_train.evaluation.reporting.report import make_report

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "mini_suite.md"
CSV_FILE = ROOT / "benchmarks/results/mini_suite.csv"
SCENES = tuple(f"scenes_{style}" for style in ("pope", "textvqa", "gqa", "mmbench", "caption"))
ARMS = {
    "tiny_lora_only": "no compression", "tiny_fastv25_s16k4_anchor": "FastV 15.6 %, the anchor",
    "tiny_fastv25_s64k16_best_lf4_anchor": "FastV 15.6 % with L_f = 4, the anchor of `make fit`",
    "tiny_fastv25_s16k4": "FastV 25 % + S16K4 router",
    "tiny_fastv25_s16k4-value_norm": "the same, groups by value norm, untrained",
    "tiny_fastv25_s16k4-leading": "the same, leading groups, untrained",
    "tiny_fastv25_s16k4-random": "the same, groups at random, untrained",
    "tiny_lora_only-aircache0.15625_visual": "AirCache 15.6 %",
    "tiny_none100_s16k4-aircache0.25_visual": "AirCache 25 % + S16K4 router",
    "tiny_lora_only-compactor0.15625_visual": "Compactor 15.6 %",
    "tiny_none100_s16k4-compactor0.234375_visual": "Compactor 23.4 % + S16K4 router",
    "tiny_lora_only-expected_attention0.15625_visual": "ExpectedAttention 15.6 %",
    "tiny_lora_only-ada+expected_attention0.15625_visual": "Ada(ExpectedAttention) 15.6 %",
    "tiny_lora_only-keydiff0.15625_visual": "KeyDiff 15.6 %", "tiny_lora_only-snapkv0.15625_visual": "SnapKV 15.6 %",
    "tiny_lora_only-snapkv0.15625_visual-context_first": "SnapKV 15.6 %, context first",
    "tiny_lora_only-kvcompose0.15625_visual-context_first": "KVCompose 15.6 %, context first",
    "tiny_lora_only-compactor0.15625_visual-context_first": "Compactor 15.6 %, context first",
    "tiny_none100_s16k4-compactor0.234375_visual-context_first": "Compactor 23.4 % + S16K4 router, context first",
    "tiny_lora_only-expected_attention0.15625_visual-context_first": "ExpectedAttention 15.6 %, context first",
    "tiny_lora_only-ada+expected_attention0.15625_visual-context_first": "Ada(ExpectedAttention) 15.6 %, context first",
    "tiny_lora_only-keydiff0.15625_visual-context_first": "KeyDiff 15.6 %, context first",
    "tinylm_lora_only": "no compression", "tinylm_quest25_s8k6_anchor": "Quest 21.9 %, the anchor",
    "tinylm_quest25_s16k12": "Quest 25 % + S16K12 router",
    "tinylm_quest25_s16k12-value_norm": "the same, groups by value norm, untrained",
    "tinylm_quest25_s16k12-leading": "the same, leading groups, untrained",
    "tinylm_quest25_s16k12-random": "the same, groups at random, untrained",
    "tinylm_lora_only-compactor0.21875": "Compactor 21.9 %",
    "tinylm_quest25_s16k12-none-compactor0.248": "Compactor 24.8 % + S16K12 router",
    "tinylm_lora_only-expected_attention0.21875": "ExpectedAttention 21.9 %",
    "tinylm_quest25_s16k12-none-expected_attention0.2424": "ExpectedAttention 24.2 % + S16K12 router",
    "tinylm_lora_only-ada+expected_attention0.21875": "Ada(ExpectedAttention) 21.9 %",
    "tinylm_lora_only-keydiff0.21875": "KeyDiff 21.9 %",
    "tinylm_quest25_s16k12-none-keydiff0.256": "KeyDiff 25.6 % + S16K12 router",
    "tinylm_lora_only-snapkv0.21875": "SnapKV 21.9 %",
    "tinylm_lora_only-snapkv0.21875-context_first": "SnapKV 21.9 %, context first",
    "tinylm_lora_only-kvcompose0.21875-context_first": "KVCompose 21.9 %, context first",
    "tinylm_lora_only-compactor0.21875-context_first": "Compactor 21.9 %, context first",
    "tinylm_quest25_s16k12-none-value_norm-compactor0.242-context_first": (
        "Compactor 24.2 % + S16K12 by value norm, context first"
    ),
    "tinylm_quest25_s16k12-none-leading-compactor0.242-context_first": "Compactor 24.2 %, leading, context first",
    "tinylm_lora_only-expected_attention0.21875-context_first": "ExpectedAttention 21.9 %, context first",
    "tinylm_quest25_s16k12-none-value_norm-expected_attention0.2384-context_first": (
        "ExpectedAttention 23.8 % + S16K12 by value norm, context first"
    ),
    "tinylm_quest25_s16k12-none-leading-expected_attention0.2384-context_first": (
        "ExpectedAttention 23.8 %, leading, context first"
    ),
    "tinylm_lora_only-ada+expected_attention0.21875-context_first": "Ada(ExpectedAttention) 21.9 %, context first",
    "tinylm_lora_only-keydiff0.21875-context_first": "KeyDiff 21.9 %, context first",
    "tinylm_quest25_s16k12-none-value_norm-keydiff0.2535-context_first": (
        "KeyDiff 25.4 % + S16K12 by value norm, context first"
    ),
    "tinylm_quest25_s16k12-none-leading-keydiff0.2535-context_first": "KeyDiff 25.4 %, leading, context first",
}  # fmt: skip
"""Arm -> words of its row, in the table's order."""
PRINTED = (
    "tiny_lora_only",
    "tiny_fastv25_s16k4_anchor",
    "tiny_fastv25_s16k4",
    "tiny_lora_only-aircache0.15625_visual",
    "tiny_none100_s16k4-aircache0.25_visual",
    "tiny_lora_only-kvcompose0.15625_visual-context_first",
    "tiny_lora_only-compactor0.15625_visual-context_first",
    "tiny_none100_s16k4-compactor0.234375_visual-context_first",
    "tiny_fastv25_s64k16_best_lf4_anchor",
    "tiny_fastv25_s16k4-value_norm",
    "tinylm_lora_only",
    "tinylm_quest25_s8k6_anchor",
    "tinylm_quest25_s16k12",
    "tinylm_quest25_s16k12-value_norm",
    "tinylm_lora_only-compactor0.21875",
    "tinylm_quest25_s16k12-none-compactor0.248",
    "tinylm_lora_only-kvcompose0.21875-context_first",
    "tinylm_lora_only-compactor0.21875-context_first",
    "tinylm_quest25_s16k12-none-value_norm-compactor0.242-context_first",
    "tinylm_lora_only-keydiff0.21875-context_first",
    "tinylm_quest25_s16k12-none-value_norm-keydiff0.2535-context_first",
)
"""Arms of the page's tables; the CSV has all."""
ONE_WORD = ("scenes_pope", "scenes_gqa", "scenes_mmbench")
"""Tasks whose answers are one token: an eviction after the prompt that saw the question cannot change them."""
NOTE = "† The eviction acts after the prompt's pass, from which these one-word answers come: it cannot change them."


def read_scores(path: Path = CSV_FILE) -> pd.DataFrame:
    """A report's CSV, every column of its kind."""
    texts = {heading: str for heading, kind in KINDS.items() if kind is object}
    numbers = {heading: kind for heading, kind in KINDS.items() if kind is not object}
    return pd.read_csv(
        path, dtype={**texts, **numbers}, keep_default_na=False, na_values={key: [""] for key in numbers}
    )


def printed_scores() -> dict[tuple[str, str], dict[str, Any]]:
    """(arm, task) -> the row of its printed score."""
    rows = read_scores().query("score == 'score'").to_dict("records")
    return {(row["arm"], row["task"]): row for row in rows}


def table() -> str:
    """The page's tables from the report's CSV: scores in %, and 95 % intervals of the difference to the anchor."""
    found = printed_scores()
    return "\n\n".join([_part(found, "tiny_", SCENES), _part(found, "tinylm_", ("recall",)), NOTE])


def is_moot(row: dict[str, Any]) -> bool:
    """Whether the arm's compression could not change the task's answers."""
    return row["acts"] == "after prefill" and row["query_aware"] == "yes" and row["task"] in ONE_WORD


def _part(found: dict[tuple[str, str], dict[str, Any]], prefix: str, tasks: tuple[str, ...]) -> str:
    arms = [arm for arm in ARMS if arm.startswith(prefix) and arm in PRINTED]
    rows = [
        [ARMS[arm], f"{found[arm, tasks[0]]['kv_with_index']:.1%}", *(_cell(found[arm, task]) for task in tasks)]
        for arm in arms
    ]
    counts = ", ".join(f"{found[arms[0], task]['n']} {task}" for task in tasks)
    return f"{markdown(['arm', 'with index', *tasks], rows)}\n\nSamples: {counts}."


def _cell(row: dict[str, Any]) -> str:
    score = f"{100 * row['value']:.1f}"
    if is_moot(row):
        return f"*{score} †*"
    if pd.isna(row["difference"]):
        return score
    return f"{score} ({interval_cell([100 * row[f'difference{end}'] for end in ('', '_low', '_high')], 1)})"


def main() -> None:
    """Write what is named above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, help="results folder of the suite")
    if (results := parser.parse_args().results) is not None:
        CSV_FILE.write_text(report_csv(make_report([results])), encoding="utf-8")
    put(PAGE, "mini", table())


if __name__ == "__main__":
    main()
