"""The benchmark pages are what the committed records say; the programs' arithmetic."""

from __future__ import annotations

import csv
import hashlib
import importlib
import json
from pathlib import Path

import pytest

from benchmarks import pairs
from tests.support.places import shown

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS = DOCS.parent / "benchmarks" / "results"
TABLES = {
    "command": ("command_tables:table", "speed/benchmark-tiny-llava-cpu-float32.json", "speed/benchmark.md"),
    "table8": ("command_tables:table", "speed/table8-scaled-cpu-float32.json", "speed/benchmark.md"),
    "decode": ("decode:markdown", "speed/decode-cpu-float32.json", "speed.md"),
    "prefill": ("prefill:times", "speed/prefill-cpu-float32.json", "speed.md"),
    "training": ("training_cost:markdown", "speed/training-cpu-float32.json", "speed.md"),
    "peers": ("peers:table", "speed/peers-cpu-float32.json", "speed.md"),
}
"""Table -> the function that makes it, of which record, and the page that shows it."""
ANSWERED = list(csv.DictReader((RESULTS / "answered.csv").open(newline="")))
"""Tables of programs that answered once and are in release 0.3."""


def recorded(path: str):
    return json.loads((RESULTS / path).read_text())


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_the_records(name):
    function, path, page = TABLES[name]
    module, _, function = function.partition(":")
    make = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    assert shown(DOCS / page, name) == make(recorded(path))


@pytest.mark.parametrize("row", ANSWERED, ids=lambda row: row["table"])
def test_a_table_whose_program_answered_once_stays_as_it_was_printed(row):
    text = shown(DOCS.parent / row["page"], row["table"])
    assert hashlib.sha256(text.encode()).hexdigest() == row["sha256"], "measured anew? then a program belongs to it"


def test_decoding_is_not_slower_than_the_token_only_cache():
    """The promise, on the recorded run: medians of interleaved ratios."""
    for row in recorded("speed/decode-cpu-float32.json")["rows"]:
        assert row["step_vs_token_only"][0] <= 1.05
        assert row["step_vs_same_bytes"][0] <= 1.10
        assert row["index_share"] <= 0.005
        if row["entries"] >= 8192:
            assert row["attention_vs_sdpa"][0] <= 0.70


def test_pairs_alternate_and_ratios_are_medians_of_rounds():
    calls: list[str] = []
    seconds = pairs.interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, pairs=2, warmup=1)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert {len(values) for values in seconds.values()} == {2}
    median, low, high = pairs.ratio({"x": [1.0, 2.0, 9.0], "y": [1.0, 1.0, 3.0]}, "x", "y")
    assert (median, low, high) == (2.0, 1.0, 3.0)
    assert pairs.cell((0.5, 0.25, 1.0)) == "0.50 [0.25, 1.00]"
