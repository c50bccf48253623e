"""A grid without weights: the facts are those that a run states, what is missing is listed, mistakes are refused."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from subtoken_train.evaluation.runner.arms import load_arm, prepare, with_anchors
from subtoken_train.evaluation.runner.dry_run import LayoutPool, check_lines, dry_run, planned_adapter
from subtoken_train.evaluation.runner.spec import Grid, TaskSpec, expand_arms
from subtoken_train.inference.pool import ModelPool
from subtoken_train.routing import RoutingConfig
from tests.support.commands import printed, refused
from tests.support.places import ROOT
from tests.support.refusals import refuses, refusing

SHIPPED = "checkpoints/adapters/tiny_fastv25_s16k4"
TEXT = "checkpoints/tiny-llama"


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def grid_of(*arms: dict, tasks: tuple[str, ...] = ("pope",), **settings) -> Grid:
    specs = tuple(spec for arm in arms for spec in expand_arms(arm))
    return Grid(arms=specs, tasks=tuple(map(TaskSpec, tasks)), out=Path("results/x"), **settings)


def test_facts_are_those_of_a_run():
    grid = grid_of(
        {"adapter": SHIPPED},
        {"adapter": SHIPPED, "selector": "value_norm", "eviction": "snapkv", "eviction_keep": [0.5, "8tokens"]},
        {"backbone": "checkpoints/tiny-llava", "reducer": "visionzip", "keep_ratio": 0.25},
    )
    loaded, notes = with_anchors(prepare(grid.arms, pool := ModelPool()), pool)
    checked = dry_run(grid, planned_adapter)
    assert [planned.arm.facts for planned in checked.arms] == [arm.facts for arm in loaded]
    assert [planned.arm for planned in checked.arms] == loaded
    assert checked.notes == notes


@pytest.mark.slow
def test_a_recipe_stands_in_the_place_of_its_adapter():
    (planned,), (trained,) = (
        [dry_run(grid_of({"adapter": name}, anchors="none"), planned_adapter).arms[0].arm]
        for name in ("runs/tiny_fastv25_s16k4/adapter", SHIPPED)
    )
    own = {"name": planned.facts.name, "adapter": planned.facts.adapter, "seed": planned.facts.seed}
    assert planned.facts == replace(trained.facts, **own)
    assert (planned.reducer, planned.routing, planned.tokens) == (trained.reducer, trained.routing, trained.tokens)
    assert planned.adapter_sha256 is None


def test_an_arm_of_other_bytes_or_groups_has_an_anchor_of_its_own():
    routing = RoutingConfig(num_groups=16, kept_groups=16, budget="bytes", byte_share=0.5)
    plan = replace(planned_adapter("runs/tiny_fastv25_s16k4/adapter"), routing=routing)
    checked = dry_run(grid_of({"adapter": "runs/spends/adapter", "byte_share": [None, 0.25, 0.125]}), lambda _: plan)
    facts, names = [planned.arm.facts for planned in checked.arms], [plan.training["name"]]
    names += [f"{names[0]}-bytes0.25", f"{names[0]}-bytes0.125"]
    assert [each.name for each in facts] == [*names, *(f"{name}-untrained_anchor" for name in names)]
    assert [each.anchor for each in facts] == [*(f"{name}-untrained_anchor" for name in names), *[None] * 3]
    assert [each.groups for each in facts[:3]] == [f"S16 bytes {share} linear" for share in (0.5, 0.25, 0.125)]
    assert [each.trained for each in facts[:3]] == [True, False, False]
    assert [each.nominal_kv for each in facts] == [0.125, 0.0625, 0.03125] * 2
    groups = {"backbone": "checkpoints/tiny-llava", "reducer": "fastv", "keep_ratio": 0.25, "groups": ["16,4", "16,12"]}
    facts = [planned.arm.facts for planned in dry_run(grid_of(groups), planned_adapter).arms]
    assert [each.anchor for each in facts] == [*(f"{each.name}-untrained_anchor" for each in facts[:2]), None, None]
    refuses("byte_share of an arm must be a number", grid_of, {"adapter": SHIPPED, "byte_share": "half"})
    refuses("byte_share is for routers of adapter: DIR", grid_of, {"backbone": TEXT, "byte_share": 0.5})
    own = grid_of({"adapter": SHIPPED, "byte_share": 0.5})
    refuses("tiny_fastv25_s16k4 spends no byte budget; leave it out", dry_run, own, planned_adapter)


@pytest.mark.slow
def test_an_arm_may_cap_images_otherwise():
    grid = grid_of({"adapter": "runs/qwenvl7b_fastv25_s16k4/adapter", "max_pixels": [None, 112896]}, anchors="none")
    names = [planned.arm.facts.name for planned in dry_run(grid, planned_adapter).arms]
    assert names == ["qwenvl7b_fastv25_s16k4", "qwenvl7b_fastv25_s16k4-pixels112896"]
    pool = LayoutPool(planned_adapter)
    assert [load_arm(spec, pool).family.max_pixels for spec in grid.arms] == [1003520, 112896]
    with pytest.raises(ValueError, match="llava scales images to sizes of its own"):
        dry_run(grid_of({"backbone": "checkpoints/tiny-llava", "max_pixels": 50000}), planned_adapter)


def test_what_is_missing_is_listed(tmp_path):
    file = str(tmp_path / "none.json")
    arm = {"adapter": "runs/tiny_fastv25/adapter", "eviction": "prefixkv", "eviction_keep": 0.5}
    arm |= {"eviction_options": {"calibration": file}}
    grid = grid_of(arm, tasks=("pope", "chartqa"), limit=7, data_root=tmp_path)
    (tmp_path / "pope").mkdir()
    checked, whose = dry_run(grid, planned_adapter), "--adapter runs/tiny_fastv25/adapter --out"
    assert dict(checked.wanted) == {
        "adapter runs/tiny_fastv25/adapter": "subtoken-train fit --config tiny_fastv25",
        f"calibration {file}": f"subtoken-train calibrate prefixkv {whose} {file}",
        "files of chartqa": "subtoken-train data chartqa",
    }
    assert [(task.source, samples) for task, samples in checked.tasks] == [(str(tmp_path / "pope"), 7), (None, 7)]
    assert check_lines(grid, checked)[0].startswith("1 arms x 2 tasks, 14 answers")
    for method in ("lkv", "headkv", "sparsemm", "kvzap", "triattention"):  # which have no numbers of their own
        arm = {"backbone": TEXT, "eviction": "lkv(snapkv)" if method == "lkv" else method, "eviction_keep": 0.5}
        grid = grid_of(arm | {"eviction_options": {f"{method}.calibration": file}}, tasks=("recall",))
        made = f"subtoken-train calibrate {method} --backbone {TEXT} --out {file}"
        assert dry_run(grid, planned_adapter).wanted == [(f"calibration {file}", made)]


test_mistakes_are_refused = refusing(
    [
        ({"adapter": "runs/no_such/adapter"}, "runs/no_such/adapter is not an adapter folder"),
        ({"backbone": "checkpoints/tiny-llava", "eviction": "snapkv", "eviction_keep": 2}, "2"),
        ({"backbone": "checkpoints/tiny-llama"}, "task pope asks about images"),
        ({"backbone": "checkpoints/tiny-llava", "dtype": "float8"}, "unknown dtype 'float8'"),
        ({"backbone": "checkpoints/tiny-llava", "reducer": "quest", "keep_ratio": 0.5}, "evicts the context"),
    ],
    lambda arm: dry_run(grid_of(arm), planned_adapter),
)


SERVED = {"length": 1000, "tasks": ["cwe"], "tokenizer": TEXT}


def test_options_and_weights_that_cannot_be_served_are_refused(tmp_path):
    grid = replace(grid_of({"backbone": TEXT}), tasks=(TaskSpec("ruler_synthetic", options=SERVED),))
    refuses(r"a prompt of cwe, and its shortest text has [\d,]+; raise it to [\d,]+", dry_run, grid, planned_adapter)
    shutil.copytree(ROOT / TEXT, tmp_path / "backbone")
    os.truncate(tmp_path / "backbone" / "model.safetensors", 100_000)
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        dry_run(grid_of({"backbone": str(tmp_path / "backbone")}, tasks=("recall",)), planned_adapter)


def test_a_chat_without_a_template_is_refused(tmp_path):
    """Of a local folder by its files, before weights are read; of a model on the Hub when its tokenizer is there."""
    tasks = (TaskSpec("ruler_synthetic", None, {"chat": True}),)
    grid = replace(grid_of({"backbone": "checkpoints/tiny-llama"}, tasks=("recall",)), tasks=tasks)
    refuses(r"has chat: true, and the tokenizer of .* has no chat template", dry_run, grid, planned_adapter)
    (arm,) = prepare(grid.arms, ModelPool())
    assert arm.chat_template is False
    there = shutil.copytree(ROOT / "checkpoints/tiny-llama", tmp_path / "instruct")
    (there / "chat_template.jinja").write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    grid = replace(grid_of({"backbone": str(there)}, tasks=("recall",)), tasks=tasks)
    checked = dry_run(grid, planned_adapter)
    assert checked.arms[0].arm.chat_template is True
    assert "    asked: in the chat template; question kept" in check_lines(grid, checked)


def test_a_nominal_prompt_is_as_long_as_its_task_says():
    tasks = (TaskSpec("ruler_synthetic", None, {"length": 4096}), TaskSpec("recall"), TaskSpec("longbench"))
    grid = replace(grid_of({"backbone": TEXT, "kv_dtype": "int8"}, tasks=("recall",)), tasks=tasks, batch_size=10)
    (planned,) = dry_run(grid, planned_adapter).arms
    assert planned.tokens == 4096
    assert planned.dense == 4096 * planned.arm.shape.token_bytes
    work = [dry_run(replace(grid, tasks=(task,)), planned_adapter).arms[0].flops[0] for task in tasks]
    assert list(planned.flops) == work
    assert work[0] > work[2] > work[1]  # 4,096; 1,024, since LongBench says none; 512
    assert any("10 x 4,096 tokens" in line for line in check_lines(grid, dry_run(grid, planned_adapter)))


def test_the_command_prints_and_writes_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    said = printed(capsys, "evaluate", "--config", "table1_llava7b", "--check", "--limit", "3")
    assert "17 arms x 7 tasks, 357 answers" in said
    assert "llava7b_fastv25_s16k4: llava-hf/llava-1.5-7b-hf; reducer fastv 0.25, groups S16K4 linear" in said
    assert "weights 13.20 GiB" in said
    assert not list(tmp_path.iterdir())
    assert "--check does not apply to --suite" in refused(capsys, "evaluate", "--suite", "mini", "--check")
