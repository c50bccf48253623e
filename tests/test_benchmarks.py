"""The benchmark pages are what the committed records say; the programs' arithmetic."""

from __future__ import annotations

import importlib
import json
import re
from itertools import product
from pathlib import Path

import pytest

from benchmarks import pairs
from benchmarks.run_records import read_runs
from tests.support.places import shown

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS = DOCS.parent / "benchmarks" / "results"
TABLES = {
    "command": ("command_tables:table", "speed/benchmark-tiny-llava-cpu-float32.json", "speed/benchmark.md"),
    "table8": ("command_tables:table", "speed/table8-scaled-cpu-float32.json", "speed/benchmark.md"),
    "decode": ("decode:markdown", "speed/decode-cpu-float32.json", "speed.md"),
    "prefill": ("prefill:times", "speed/prefill-cpu-float32.json", "speed/prompts.md"),
    "memory": ("prefill:memory", "speed/statistics_memory.json", "speed/prompts.md"),
    "chunked": ("chunked_prefill:table", "speed/chunked-prefill-cpu-float32.json", "speed/prompts.md"),
    "training": ("training_cost:markdown", "speed/training-cpu-float32.json", "speed/training.md"),
    "eviction": ("eviction_accuracy:table", "eviction", "quality.md"),
    "thin_layers": ("thin_layers:table", "speed/thin_layers.json", "speed.md"),
    "eviction_passes": ("thin_layers:eviction_table", "speed/thin_layers.json", "speed.md"),
    "compression_step": ("compression_step:table", "speed/compression_step.json", "speed/prompts.md"),
    "peers": ("peers:table", "speed/peers-cpu-float32.json", "speed/prompts.md"),
    "recall_peers": ("recall_peers:table", "recall_peers.json", "quality/recall.md"),
    "real_peers": ("real_peers:table", "real_peers.json", "quality/real_weights.md"),
    "served": ("served_together:table", "speed/served_together.json", "serving.md"),
}
"""Table -> the function that makes it, of which records (a file's content, or a folder), and the page that shows it."""


def recorded(path: str):
    return json.loads((RESULTS / path).read_text())


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_the_records(name):
    function, path, page = TABLES[name]
    module, _, function = function.partition(":")
    make = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    assert shown(DOCS / page, name) == make(recorded(path) if path.endswith(".json") else RESULTS / path)


def test_every_registered_method_was_measured_or_is_named_and_kept_its_budget():
    from subtoken_train.evictions import EVICTIONS

    eviction = importlib.import_module("benchmarks.eviction_accuracy")
    runs = read_runs(RESULTS / "eviction")
    measured = {run["method"] for run in runs}
    named = set(re.findall(r"`(\w+)`", shown(DOCS / "quality.md", "eviction").splitlines()[-1]))
    assert measured | named == {*EVICTIONS, eviction.NONE}
    assert not measured & named
    asked = {(run["method"], run["base"], run["fraction"]) for run in runs if run["method"] != eviction.NONE}
    assert asked == set(product(measured - {eviction.NONE}, eviction.ADAPTERS, eviction.FRACTIONS))
    assert all(run["measured"] <= run["fraction"] + 1e-9 for run in runs)
    assert {len(run[name]) for run in runs for name in ("scores", "kinds")} == {1200}


def test_kvcompose_recalls_what_the_release_recalls():
    record = recorded("recall_peers.json")
    assert record["contexts"] == len(record["asked"]) == 60
    pairs = {(pair["ours"], pair["kvpress"]): pair for pair in record["paired"]}
    hits = record["hits"]
    assert hits["ours kvcompose, kvpress"] == hits["kvpress KVCompose"]  # in every context
    for kept in map(str, record["kept"]):
        assert pairs["kvcompose", "KVCompose"][kept][1] > 0  # as in the paper
        assert pairs["kvcompose, causal", "KVCompose"][kept][2] < -10
        sets = record["kept_sets"]["kvcompose, kvpress"][kept]
        assert sets["entries_that_one_side_keeps"] < 2e-3 * sets["entries_kept"]


def test_methods_that_draw_nothing_keep_what_the_presses_keep():
    """Where entries differ they are ties in the press's scores, or as far apart as rounding makes them."""
    record = recorded("recall_peers.json")
    adaptive = ("ada(expected_attention)", "ada(snapkv)")
    for name in ("expected_attention", "keydiff", "tova, kvpress", "snapkv", "knorm", *adaptive):
        for kept in map(str, record["kept"]):
            sets = record["kept_sets"][name][kept]
            assert sets["contexts_equal"] == record["contexts"] or sets["widest"] < 1e-5, (name, kept)


def test_on_real_weights_a_press_s_settings_keep_its_entries():
    """All but ties and what rounding moves, one entry in a thousand; scores agree to rounding."""
    record = recorded("real_peers.json")
    assert set(record) == {"smollm2", "qwen05"}
    for model in record.values():
        assert model["versions"]["kvpress's side"]["kvpress"] == "0.5.4"
        rows = {row["ours"]: row["budgets"] for row in model["rows"]}
        for name in PRESS_SETTINGS:
            for budget in rows[name]:
                assert budget["ours"] == budget["kvpress"]
                assert budget["both"] >= 0.999 * budget["ours"] or budget["widest"] < 1e-5, (name, budget)
                assert budget.get("largest", 0) < 2e-3
                assert budget.get("ranks", 1) > 0.999


PRESS_SETTINGS = (
    "knorm", "keydiff", "streaming_llm", "snapkv", "tova, the last entry stays", "expected_attention",
    "compactor, last chunk filled up", "h2o, means, no recent half", "kvzip, heads may be left empty",
    "the same, in the chat template", "kvcompose, kvpress", "pyramidkv, kvpress", "critical(snapkv), mean of rows",
    "critical(expected_attention)", "ada(snapkv)", "ada(expected_attention)",
)  # fmt: skip
"""Rows of ``real_peers.py``."""


def test_compactor_recalls_what_the_press_recalls():
    """Its sketches are drawn anew: the paired interval over contexts holds 0, for means of five."""
    record = recorded("recall_peers.json")
    pairs = {(pair["ours"], pair["kvpress"]): pair for pair in record["paired"]}
    for ours in ("compactor", "compactor, kvpress"):
        for kept in map(str, record["kept"]):
            _, low, high = pairs[ours, "Compactor"][kept]
            assert low <= 0 <= high


def test_a_compression_step_is_no_slower_than_kvpress():
    """The promise, on the recorded run: medians of ratios, in turns."""
    rows = recorded("speed/compression_step.json")["rows"]
    assert {row["method"] for row in rows} >= {"expected_attention", "compactor", "keydiff", "tova", "lagkv", "snapkv"}
    assert all(row["ratio"][0] <= 1.2 for row in rows)


def test_decoding_is_not_slower_than_the_token_only_cache():
    """The promise, on the recorded run: medians of interleaved ratios."""
    for row in recorded("speed/decode-cpu-float32.json")["rows"]:
        assert row["step_vs_token_only"][0] <= 1.05
        assert row["step_vs_same_bytes"][0] <= 1.10
        assert row["index_share"] <= 0.005
        if row["entries"] >= 8192:
            assert row["attention_vs_sdpa"][0] <= 0.70


def test_routing_costs_thin_layers_nothing_in_c():
    """The promise, on the recorded runs: medians of interleaved ratios."""
    rows = [row for run in recorded("speed/thin_layers.json") if run["by"] == "C" for row in run["steps"]]
    assert {row["entries"] for row in rows} == {560, 2048, 8192}
    assert all(row["step"]["same tokens"][0] <= 1.05 for row in rows)


def test_what_an_eviction_adds_to_a_prompt_s_pass():
    """At most a tenth, but for those that need the whole attention matrix or every value's output."""
    rows = [row for run in recorded("speed/thin_layers.json") for row in run["passes"] if "evictions" in row]
    assert rows
    for row in rows:
        dear = {name for name, found in row["evictions"].items() if found[0] > 1.1}
        assert dear <= {"h2o", "elastic", "prefixkv", "critical(expected_attention)"}
        assert row["evictions"]["kvzap"][0] <= 1.05


def test_pairs_alternate_and_ratios_are_medians_of_rounds():
    calls: list[str] = []
    seconds = pairs.interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, pairs=2, warmup=1)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert {len(values) for values in seconds.values()} == {2}
    median, low, high = pairs.ratio({"x": [1.0, 2.0, 9.0], "y": [1.0, 1.0, 3.0]}, "x", "y")
    assert (median, low, high) == (2.0, 1.0, 3.0)
    assert pairs.cell((0.5, 0.25, 1.0)) == "0.50 [0.25, 1.00]"
