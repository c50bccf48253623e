"""Known answers on the shipped models: a random choice of groups is worse, full budgets are the backbone itself."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from subtoken_train.datasets.scene_files import write_scene_split
from subtoken_train.evaluation.results import Manifest, read_samples
from subtoken_train.evaluation.runner.run import run_grid
from subtoken_train.evaluation.runner.spec import ArmSpec, TaskSpec, expand_arms
from tests.support.eval_runs import ADAPTERS, ROUTED, scenes_grid


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    write_scene_split(folder, "test", 400, seed=3)
    return folder


@pytest.mark.slow
def test_random_groups_score_lower_than_the_trained_router(scenes, tmp_path):
    random = replace(ROUTED, selector="random")
    trained, drawn = (
        list(read_samples(folder).values())
        for folder in run_grid(scenes_grid(scenes, tmp_path, ROUTED, random, tasks=("scenes_caption",), batch_size=16))
    )
    assert mean(record.score for record in trained) > mean(record.score for record in drawn) + 0.05
    assert [record.region_bytes for record in trained] == [record.region_bytes for record in drawn]


@pytest.mark.slow
def test_seeds_of_a_random_selector_are_arms_of_their_own(scenes, tmp_path):
    arms = expand_arms({"adapter": ROUTED.adapter, "selector": "random", "seed": [1, 2, 0]})
    folders = run_grid(scenes_grid(scenes, tmp_path, *arms, replace(ROUTED, selector="random"), limit=40))
    facts = [Manifest.read(folder).arm for folder in folders]
    assert [(arm.name.removeprefix("tiny_fastv25_s16k4-seed0-"), arm.seed) for arm in facts] == [
        ("random-seed1", 1), ("random-seed2", 2), ("random-seed0", 0), ("random", 0),
    ]  # fmt: skip
    one, two, zero, own = ({k: r.prediction for k, r in read_samples(folder).items()} for folder in folders)
    assert one != two
    assert zero == own


@pytest.mark.slow
def test_a_budget_of_one_is_the_backbone(scenes, tmp_path):
    backbone = ArmSpec(backbone="checkpoints/tiny-llava")
    kept = [
        replace(backbone, name="reducer", reducer="fastv", keep_ratio=1.0),
        replace(backbone, name="eviction", eviction="snapkv", eviction_keep=1.0, scope="visual"),
        replace(backbone, name="context_first", protocol="context_first"),
    ]
    alone, *others = (
        {key: record.prediction for key, record in read_samples(folder).items()}
        for folder in run_grid(scenes_grid(scenes, tmp_path, backbone, *kept, limit=40))
    )
    assert all(other == alone for other in others)


@pytest.mark.slow
def test_the_anchor_costs_at_least_as_much_after_an_eviction(scenes, tmp_path):
    """Shares of few entries: 4 of 16 routed tokens cost 2.5 whole ones; of the anchor's 10 it is 3, rounded up."""
    evicted = replace(ROUTED, eviction="streaming_llm", eviction_keep=0.25)
    folders = run_grid(scenes_grid(scenes, tmp_path, evicted, limit=4, anchors="auto"))
    ours, theirs = (list(read_samples(folder).values()) for folder in folders)
    for mine, its in zip(ours, theirs, strict=True):
        assert (mine.region_bytes - mine.index_bytes) * 6 == its.region_bytes * 5
        assert its.region_bytes == its.region_dense_bytes * 3 / 64


@pytest.mark.slow
def test_recall_under_quest(tmp_path):
    names = ("tinylm_lora_only", "tinylm_quest25_s16k12", "tinylm_quest25_s8k6_anchor")
    grid = scenes_grid(tmp_path, tmp_path, *(ArmSpec(adapter=f"{ADAPTERS}/{name}") for name in names), anchors="auto")
    tasks = (TaskSpec("recall", options={"contexts": 24}),)
    folders = run_grid(replace(grid, tasks=tasks, batch_size=8))
    whole, routed, anchor = (mean(r.score for r in read_samples(folder).values()) for folder in folders)
    assert whole == 1
    assert anchor < routed < whole
    assert Manifest.read(folders[1]).arm.anchor == Manifest.read(folders[2]).arm.name
