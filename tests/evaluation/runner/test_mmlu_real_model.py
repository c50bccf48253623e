"""MMLU's real questions on a real language model: the reference log-likelihoods, and what compression does to them."""

from __future__ import annotations

import json

import pytest

from subtoken_train.evaluation.results import read_samples
from subtoken_train.evaluation.runner.arms import load_arm, prepare
from subtoken_train.evaluation.runner.cell import Cell
from subtoken_train.evaluation.runner.processes import ONE
from subtoken_train.evaluation.runner.spec import ArmSpec
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.inference.pool import ModelPool


@pytest.fixture
def golden(shared):
    lines = (shared / "golden_eval/lm_loglikelihood/set_a.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "multiple_choice"]
    return {f"{row['subject']}/{row['index']}": row for row in rows}


@pytest.fixture
def asked(golden, shared):
    """The task, and those of its 14,042 samples that have a reference."""
    task = build_task("mmlu", shared / "realdata/mmlu", num_fewshot=0)
    samples = task.samples()
    assert len(samples) == 14_042
    return task, [sample for sample in samples if sample.id in golden]


def answered(shared, tmp_path, asked, **settings):
    pool = ModelPool()
    (arm,) = prepare([ArmSpec(backbone=str(shared / "realdata/tinystories/hf"), **settings)], pool)
    cell = Cell(arm, asked[0], asked[1], tmp_path / "cell", batch_size=4)
    cell.answer(load_arm(arm.spec, pool), ONE)
    return arm.facts, read_samples(cell.folder)


@pytest.mark.slow
def test_uncompressed_they_are_the_reference(shared, tmp_path, golden, asked):
    facts, found = answered(shared, tmp_path, asked)
    assert found.keys() == golden.keys()
    for key, row in golden.items():
        assert found[key].prediction == pytest.approx(row["loglikelihood"], abs=1e-4)
        assert found[key].score == float(row["pred"] == row["answer"])
        assert found[key].entries_after == found[key].entries_before
    assert facts.acts == "-"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "acts"),
    [
        ({"reducer": "quest", "keep_ratio": 0.5, "reducer_options": {"page_size": 4, "window": 4}}, "in prefill"),
        ({"eviction": "snapkv", "eviction_keep": 0.3, "protocol": "context_first"}, "after prefill of the context"),
    ],
)
def test_compressed_they_differ_and_the_records_say_so(shared, tmp_path, golden, asked, settings, acts):
    facts, found = answered(shared, tmp_path, asked, **settings)
    assert facts.acts == acts
    for key, row in golden.items():
        assert found[key].prediction != pytest.approx(row["loglikelihood"], abs=1e-4)
        assert 0 < found[key].entries_after < found[key].entries_before
