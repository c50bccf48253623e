"""The training-cost program: turns, the sides' input, what it counts, and what was recorded. Nothing here is timed."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import training_arms, training_cases
from checkpoints.tiny_llava import build_model
from subtoken_train.engine.build import assemble
from subtoken_train.functional.objective import answer_loss, predicting_rows
from subtoken_train.types import Region
from tests.support.sampling import sampled
from tests.support.text_families import text_family

RECORD = Path(__file__).resolve().parents[1] / "benchmarks/results/speed/training-cpu-float32.json"


@pytest.fixture(scope="module")
def cost():
    return importlib.import_module("benchmarks.training_cost")


@pytest.fixture(scope="module")
def cases():
    """The two kinds of a case at the size of a test."""
    image = replace(
        training_cases.CASES["llava-fastv"],
        config=lambda: build_model(text_layers=2).config,
        batch_size=2,
        compressed=64,
        rank=2,
    )
    text = replace(
        training_cases.CASES["llama-quest"],
        config=lambda: text_family(layers=2).model.config,
        batch_size=2,
        compressed=128,
        rank=2,
    )
    return {"image": image, "text": text}


def test_loops_take_turns_and_end():
    seen: list[tuple[str, int]] = []

    def loop(name):
        def run(after_step):
            for step in range(3):
                seen.append((name, step))
                after_step()
            seen.append((name, -1))

        return run

    first, second = (training_arms.Turns(loop(name)) for name in "ab")
    for turn in (first, second, second, first, first, second):
        turn.advance()
    assert seen == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    first.finish()
    assert seen[-1] == ("a", -1)
    second.finish()


def test_an_error_in_a_loop_comes_out_where_turns_are_given():
    def broken(after_step):
        after_step()
        raise RuntimeError("broken")

    turns = training_arms.Turns(broken)
    turns.advance()
    with pytest.raises(RuntimeError, match="broken"):
        turns.advance()


@pytest.mark.parametrize("kind", ["image", "text"])
def test_both_sides_of_a_comparison_read_the_same_input(cases, kind):
    """At its start LoRA changes nothing, so the loss of our pass is that of the plain model on the plain batch."""
    case = cases[kind]
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


@pytest.mark.slow
@sampled("kind", ["image", "text"], every=2)
def test_every_side_takes_its_steps(cost, cases, kind):
    makes = cost.sides(cases[kind], "cpu", torch.float32)
    clock = iter(range(10_000)).__next__
    for names in (("routed", "unrouted"), ("ours", "plain")):
        seconds = cost.timed({name: makes[name] for name in names}, 2, clock)
        assert seconds == {name: [1, 1] for name in names}


@pytest.mark.slow
def test_the_peak_holds_weights_and_more_with_routers(cost, cases):
    held = cost.peaks(cases["image"], "cpu", torch.float32)
    assert list(held) == ["float32", "bfloat16"]
    for kind, peak in held.items():
        weights = sum(part.nbytes for part in cases["image"].model("cpu", getattr(torch, kind)).parameters())
        assert weights < peak["unrouted"] < peak["routed"]


def test_a_record_keeps_the_rows_that_were_not_measured_anew(cost, tmp_path):
    path = tmp_path / "record.json"
    rows = [{"case": name, "run": 1} for name in ("llava-reduced", "tiny-llava")]
    path.write_text(json.dumps({"rows": rows}))
    merged = cost.merged(path, {"rows": [{"case": "tiny-llava", "run": 2}, {"case": "llama-quest", "run": 2}]})
    assert [(row["case"], row["run"]) for row in merged["rows"]] == [
        ("llava-reduced", 1),
        ("llama-quest", 2),
        ("tiny-llava", 2),
    ]


def test_what_was_recorded_keeps_the_promises(cost):
    """Routers cost at most 5 % of a step and of the peak; our fit is no slower than the plain one.

    tiny-llava is so narrow that what routing adds is no small part; it is recorded and bounded beside them.
    """
    rows = json.loads(RECORD.read_text())["rows"]
    assert {row["case"] for row in rows} == set(cost.ON_CPU)
    for row in rows:
        tiny = row["case"] == "tiny-llava"
        assert row["pairs"] >= 30
        assert row["step_ratio"][0] <= (1.10 if tiny else 1.05)
        assert row["tokens_ratio"][0] >= (0.99 if tiny else 1.0)
        assert all(memory <= (1.15 if tiny else 1.05) for memory in row["memory_ratio"].values())
