"""The training-cost program: the sides' input, a unit, and what was recorded. Nothing here is timed."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_sizes, gpu_suite, gpu_units, peer_side, peers, training_arms, training_cases
from checkpoints.tiny_llava import build_model
from subtoken_train.engine.build import assemble
from subtoken_train.functional.objective import answer_loss, predicting_rows
from subtoken_train.types import Region
from tests.support.sampling import sampled
from tests.support.text_families import text_family

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
