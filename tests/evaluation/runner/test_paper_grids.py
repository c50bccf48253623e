"""The paper's grids arm by arm, and MMLU's real questions: every arm is served, matched arms hold equal bytes."""

import json
import re
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
import yaml

from subtoken_train.evaluation.results import read_samples
from subtoken_train.evaluation.runner.arms import load_arm, prepare
from subtoken_train.evaluation.runner.cell import ONE, make_cell, run_cell
from subtoken_train.evaluation.runner.spec import ArmSpec
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.inference.pool import ModelPool
from subtoken_train.reducers import build_reducer
from subtoken_train.resources import recipe_text
from subtoken_train.types import Region
from tests.support import places
from tests.support.prompt_views import context_view

GRIDS = ("table3_llama7b", "table3_qwen7b")


def models_of(grid: str) -> dict[str, dict]:
    """What the recipes of a grid's arms say of their models, by name."""
    content = yaml.safe_load((places.RECIPES / "eval" / f"{grid}.yaml").read_text())
    names = [Path(adapter).parent.name for arm in content["arms"] for adapter in arm.get("adapter", ())]
    return {name: yaml.safe_load(recipe_text(places.recipe(name)))["model"] for name in names}


def pairs_of(models: dict[str, dict]) -> dict[str, str]:
    """Every routed arm's anchor: of the same reducer, at as many bytes of every token."""
    pairs = {}
    for name, model in models.items():
        if model.get("routing"):
            keep, share = model["reducer"]["keep_ratio"], value_share(model)
            (pairs[name],) = (
                other for other, its in models.items()
                if its["reducer"].get("matches") == keep and its["reducer"]["keep_ratio"] == keep * share
            )  # fmt: skip
    return pairs


def value_share(model: dict) -> Fraction:
    """What a token takes in an arm, of a whole one."""
    routing = model.get("routing")
    return (1 + Fraction(routing["kept_groups"], routing["num_groups"])) / 2 if routing else Fraction(1)


@cache
def prefix_lengths(folder: Path) -> dict[str, int]:
    """Words and marks of every subject's few-shot prefix: a stand-in for tokens."""
    task = build_task("mmlu", folder)
    prefixes = {subject: task.prefix(subject, rows) for subject, rows in task._by_subject("dev").items()}
    return {subject: len(re.findall(r"\w+|[^\w\s]", prefix)) for subject, prefix in prefixes.items()}


@pytest.fixture
def lengths(shared) -> dict[str, int]:
    return prefix_lengths(shared / "realdata/mmlu")


@pytest.mark.parametrize("grid", GRIDS)
def test_every_subject_is_served_and_matched_arms_are_less_than_a_token_apart(lengths, grid):
    assert len(lengths) == 57
    assert min(lengths.values()) < 512  # 64 of 12.5 %, which the window would take alone
    models = models_of(grid)
    view = context_view([[Region.CONTEXT] * tokens + [Region.QUERY] * 3 for tokens in lengths.values()])
    held = {}
    for name, model in models.items():
        reducer = build_reducer(**model["reducer"])
        if reducer.acts:
            held[name] = [value_share(model) * int(kept) for kept in reducer.keep_context(view).sum(-1)]
    pairs = pairs_of(models)
    assert len(pairs) == 8
    assert len(set(pairs.values())) == 4
    for name, anchor in pairs.items():
        assert all(0 <= its - ours < 1 for ours, its in zip(held[name], held[anchor], strict=True))
    assert len(set(map(tuple, held.values()))) == len(held) - 4  # S8 and S16 hold the same


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
    backbone = load_arm(arm.spec, pool)
    run_cell(make_cell(arm, *asked, backbone.family), tmp_path / "cell", backbone, 4, ONE)
    return arm.facts, read_samples(tmp_path / "cell")


@pytest.mark.slow
def test_uncompressed_they_are_the_reference(shared, tmp_path, golden, asked):
    facts, found = answered(shared, tmp_path, asked)
    assert found.keys() == golden.keys()
    for key, row in golden.items():
        assert found[key].prediction == pytest.approx(row["loglikelihood"], abs=1e-4)
        assert found[key].score == float(row["pred"] == row["answer"])
        assert found[key].entries_after == found[key].entries_before
    assert facts.acts == "-"
