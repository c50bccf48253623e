"""The benchmark pages are what committed records say; the programs' arithmetic, sides and units; nothing is timed."""

import csv
import hashlib
import importlib
import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from benchmarks import gpu_sizes, gpu_suite, gpu_units, pairs, peer_side, peers, training_arms, training_cases
from benchmarks.bf16_products import WideProducts
from benchmarks.goldens import COLUMNS, TABLE
from benchmarks.mutants import found_again, mutants_of
from benchmarks.run_records import add_run, has_run, read_runs
from checkpoints.tiny_llava import build_model
from subtoken_train.engine.build import assemble
from subtoken_train.functional.objective import answer_loss, predicting_rows
from subtoken_train.types import Region
from tests.support.places import shown
from tests.support.sampling import sampled
from tests.support.text_families import text_family

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS = DOCS.parent / "benchmarks" / "results"
TABLES = {
    "gpus": ("gpu_suite:goals", "speed/gpu-suite.json", "speed.md"),
    "decode": ("decode:table", "speed/decode-cpu-float32.json", "speed.md"),
    "prefill": ("prefill:times", "speed/prefill-cpu-float32.json", "speed.md"),
    "recipe": ("prefill:recipe", "speed/recipe-cpu-float32.json", "speed.md"),
    "training": ("training_cost:table", "speed/training-cpu-float32.json", "speed.md"),
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


UNIT = 2**-8  # a bfloat16 number lies at most this part of itself from what it was rounded from


def exact(rows, weight, bias=None):
    with torch.autocast("cpu", enabled=False):
        return linear(rows.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_sums_are_rounded_once(biased, autocast):
    draw = torch.Generator().manual_seed(0)
    rows, weight, bias = (torch.randn(shape, generator=draw).bfloat16() for shape in ((2, 5, 64), (7, 64), (7,)))
    given = (bias if biased else None,)
    truth = exact(rows, weight, *given)
    if autocast:
        rows, weight = rows.float(), weight.float()
    with WideProducts(), torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        first, again = (linear(rows, weight, *given) for _ in range(2))
        by_name = linear(rows, weight, bias=given[0])
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, again)
    assert torch.equal(first, by_name)
    assert bool(((first.double() - truth).abs() <= UNIT * truth.abs() + 1e-5).all())


def test_gradients_are_rounded_once():
    draw = torch.Generator().manual_seed(1)
    rows, weight, pull = (torch.randn(shape, generator=draw).bfloat16() for shape in ((6, 32), (9, 32), (6, 9)))
    rows.requires_grad_()
    weight.requires_grad_()
    with WideProducts():
        linear(rows, weight).backward(pull)
    truths = pull.double() @ weight.double(), pull.double().T @ rows.double()
    for own, truth in zip((rows.grad, weight.grad), truths, strict=True):
        assert bool(((own.double() - truth).abs() <= UNIT * truth.abs() + 1e-5).all())


def test_a_trained_weight_is_read_anew_and_fp32_is_left_alone():
    rows, weight = torch.ones(1, 4).bfloat16(), torch.ones(2, 4).bfloat16().requires_grad_()
    with WideProducts() as mode, torch.no_grad():
        assert linear(rows, weight).tolist() == [[4, 4]]
        weight.mul_(2)
        assert linear(rows, weight).tolist() == [[8, 8]]
        assert linear(rows.float(), weight.float()).dtype == torch.float32
    assert not mode.held


def test_a_table_gives_back_what_was_added(tmp_path):
    folder = tmp_path / "new"
    assert read_runs(folder) == []
    measured = {"log_likelihood": [-0.1234, None], "digit_f1": [1.0, 0.0]}
    runs = [
        {"arm": "b", "seed": 0, "scores": [0.3333, 1.0], "kinds": ["read", "list"], "measures": measured},
        {"arm": "a", "seed": 1, "scores": [], "predictions": ["é\n", ""], "commit": "c0ffee"},
        {"arm": "a", "seed": 0, "scores": [1e-300], "measures": {}},
    ]
    for run in runs:
        add_run(folder, run)
    assert read_runs(folder) == [runs[2], runs[1], runs[0]]
    assert has_run(folder, "a", 1)
    assert not has_run(folder, "b", 1)


TEXT = """'''Text with 1 number.'''
LIMIT = 5  # ü

def clamp(value: "Literal[3]", low: int = 2) -> int:
    note: Literal[4] = f"ü {value + 1}"
    if not value < low and value in (7,):
        raise ValueError("ü")
    value += low
    print(value)
    return low - value
"""


def test_every_kind_of_fault_and_nothing_else():
    assert sorted((each.line, each.kind, each.before, each.after) for each in mutants_of("a.py", TEXT)) == [
        (6, "comparison", "value < low", "(value <= low)"), (6, "comparison", "value in (7,)", "(value not in (7,))"),
        (6, "condition", "not value < low", "(value < low)"),
        (6, "condition", "not value < low and value in (7,)", "(not value < low or value in (7,))"),
        (6, "number", "7", "8"), (7, "dropped", 'raise ValueError("ü")', "pass"),
        (8, "dropped", "value += low", "pass"), (9, "dropped", "print(value)", "pass"),
        (10, "arithmetic", "low - value", "(low + value)"),
    ]  # fmt: skip


def test_a_mutant_is_found_where_its_line_has_moved_to():
    other = TEXT.replace("value", "amount").replace("def clamp", "LOW = 1\n\n\ndef clamp")
    every = [*mutants_of("a.py", other), *mutants_of("b/a.py", f"X = 1\n{TEXT}")]
    for mutant in mutants_of("a.py", TEXT):
        found = found_again({"name": mutant.name, "code": mutant.code}, every)
        assert found is not None
        assert (found.before, found.code) == (mutant.before, mutant.code)
        assert (found.file, found.line) != (mutant.file, mutant.line)
        assert found_again({"name": mutant.name, "code": "of another thing altogether ()"}, every) is None


PAGE = Path(__file__).resolve().parents[1] / "docs" / "quality.md"


def table():
    with TABLE.open(newline="") as file:
        return list(csv.reader(file))


def explained():
    """Folders that the page names with a reason."""
    rows = PAGE.read_text().split("<!-- goldens:start -->\n")[1].split("<!-- goldens:end -->")[0].splitlines()[2:]
    return {name.strip() for row in rows for name in row.split("|")[1].split(",")}


def test_every_folder_is_compared_or_explained(shared):
    """A case begins with its folder's name, or holds it as a word."""
    folders = {path.name for path in (shared / "golden").iterdir()}
    assert folders - {word.strip(":,") for _, case, _ in table()[1:] for word in case.split()} - explained() == set()
    assert explained() <= folders


def test_sets_are_the_originals_and_scores_are_near():
    header, *rows = table()
    assert header == COLUMNS
    assert len({(method, case) for method, case, _ in rows}) == len(rows)
    for method, case, difference in rows:
        exact = "that differ" in case or "counts" in case
        assert "misses" in case or float(difference) <= (0 if exact else 1e-4), (method, case)


RECORD = Path(__file__).resolve().parents[1] / "benchmarks/results/speed/training-cpu-float32.json"


CASES = {
    "llava-fastv": {"config": lambda: build_model(text_layers=2).config, "compressed": 64},
    "llama-quest": {"config": lambda: text_family(layers=2).model.config, "compressed": 128},
}
"""A case of each kind at the size of a test."""


@pytest.mark.parametrize("name", CASES)
def test_both_sides_of_a_comparison_read_the_same_input(name):
    """At its start LoRA changes nothing, so the loss of our pass is that of the plain model on the plain batch."""
    case = replace(training_cases.CASES[name], **CASES[name], batch_size=2, rank=2)
    records = case.records(2)
    parts, _ = assemble(case.family("cpu", torch.float32), case.lora, training_cases.UNREDUCED, None)
    batch = training_cases.join(records)
    with torch.no_grad():
        result = parts.run(batch)
        rows, targets = predicting_rows(result.labels(batch.labels_BN))
        total = answer_loss(parts.logits(result, rows), targets)
        plain = case.model("cpu", torch.float32)(**training_arms.plain_batch(records)).loss
    assert torch.allclose(total / len(targets), plain, atol=1e-5)
    compressed = Region.VISUAL if case.vlm else Region.CONTEXT
    assert int((batch.regions_BN == compressed).sum()) == 2 * case.compressed
    assert batch.record_ids == ["record-0", "record-1"]


def test_what_was_recorded_keeps_the_promises():
    """Bound routers at 5 % of a step and of the peak, our fit at the plain one, and narrow tiny-llava by itself."""
    cost = import_module("benchmarks.training_cost")
    rows = json.loads(RECORD.read_text())["rows"]
    assert {row["case"] for row in rows} == set(cost.ON_CPU)
    for row in rows:
        tiny = row["case"] == "tiny-llava"
        assert row["pairs"] >= 30
        assert row["step_ratio"][0] <= (1.10 if tiny else 1.05)
        assert row["tokens_ratio"][0] >= (0.99 if tiny else 1.0)
        assert all(memory <= (1.15 if tiny else 1.05) for memory in row["memory_ratio"].values())


def test_our_side_answers_as_the_protocol_says(tmp_path, monkeypatch):
    """Every method: a step leaves the cache as it was, half of the entries or key channels are not held."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    monkeypatch.setattr(peer_side, "SHAPE", {**peer_side.SHAPE, **small})
    peer_side.random_weights(256, tmp_path)
    ours = import_module("benchmarks.peers_ours")
    answers = peer_side.Answers(ours.Ours(peer_side.load(256, tmp_path)), 256)
    dense = 2 * 2 * 2 * 16 * 256 * 4
    held = {}
    with torch.no_grad():
        for method in ours.COMPRESSIONS:
            held[method] = answers.fill(method)["bytes"]
            before = answers.logits(method)
            assert answers.decode(method, 3) >= 0
            assert answers.logits(method) == before
    assert set(held) == set(peers.METHODS)
    assert held["none"] == dense
    assert held["snapkv"] == held["kvcompose"] == dense // 2
    assert dense // 2 <= held["kvcompose_heads"] < 0.51 * dense
    assert 0.75 * dense < held["think"] < 0.8 * dense  # the last 32 of 256 keys stay whole


TINY = gpu_units.Settings("cpu", torch.bfloat16, gpu_sizes.QUICK)
MEASURED = [name for name in gpu_units.units(gpu_sizes.QUICK) if not name.startswith(("tests", "table8", "answer"))]
"""All but those that run what other tests are about."""


@sampled("name", MEASURED, every=6)
def test_a_unit_runs_and_states_its_goals(name):
    found = gpu_suite.run_unit(name, TINY)
    assert "error" not in found
    json.dumps(found)
    assert found["goals"]
    for goal in found["goals"]:
        assert set(goal) == {"what", "value", "bound", "met"}
        assert goal["value"] >= 0
