"""A grid runs, stops and goes on without repeating or losing anything, and joins only records of the same settings."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from subtoken_train.artifact.folder import identify
from subtoken_train.cli.main import main
from subtoken_train.datasets.scenes import write_scene_split, write_scenes
from subtoken_train.evaluation.reporting.runs import read_results
from subtoken_train.evaluation.reporting.score_tables import make_tables
from subtoken_train.evaluation.results import MANIFEST_FILE, Manifest, read_samples
from subtoken_train.evaluation.runner import cell
from subtoken_train.evaluation.runner.arms import prepare
from subtoken_train.evaluation.runner.run import run_grid
from subtoken_train.evaluation.runner.spec import ArmSpec, TaskSpec
from subtoken_train.evictions.h2o import LayerShares
from subtoken_train.families.backbone_config import BackboneConfig, resolve
from subtoken_train.inference.pool import ModelPool, load_backbone
from subtoken_train.reducers.staged import PruneSchedules
from subtoken_train.resources import resource
from tests.support.eval_runs import ANCHOR, ROUTED, WHOLE, answers, free_port, records, scenes_grid, start
from tests.support.prompt_views import written
from tests.support.refusals import refuses
from tests.support.sampling import sampled

KILLED = ("scenes_pope", "scenes_gqa", "scenes_caption")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    write_scene_split(folder, "test", 120, seed=3)
    return folder


@pytest.fixture
def asked(monkeypatch):
    """Ids of the samples that the model was asked, in order."""
    seen: list[str] = []
    generate = cell.generate_batch

    def counted(backbone, prompts, **settings):
        seen.extend(prompts.record_ids)
        return generate(backbone, prompts, **settings)

    monkeypatch.setattr(cell, "generate_batch", counted)
    return seen


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on(scenes, tmp_path, asked):
    whole = scenes_grid(scenes, tmp_path / "whole", ROUTED, WHOLE, tasks=KILLED)
    expected = {folder.relative_to(whole.out): records(folder) for folder in run_grid(whole)}
    total = sum(map(len, expected.values()))
    cut = replace(whole, out=tmp_path / "cut")
    process = start(cut)
    while lines_written(cut.out) < total // 4 and process.is_alive():
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    kept = lines_written(cut.out)
    assert 0 < kept < total
    with next(cut.out.glob("*/*/samples-*")).open("a") as file:
        file.write('{"id": "half a li')  # a line that the kill cut off
    asked.clear()
    assert {folder.relative_to(cut.out): records(folder) for folder in run_grid(cut)} == expected
    assert len(asked) == total - kept
    asked.clear()
    assert run_grid(cut)
    assert asked == []


def lines_written(folder) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*/*/samples-*"))


@sampled("finished", [0, 2], every=2)
def test_two_processes_answer_as_one(scenes, tmp_path, finished):
    """``finished``: what one process left before two went on."""
    alone = scenes_grid(scenes, tmp_path / "alone", ROUTED, tasks=("scenes_gqa", "scenes_caption"))
    read = answers if finished else records  # a batch that goes on is smaller
    expected = {folder.relative_to(alone.out): read(folder) for folder in run_grid(alone)}
    both, port = replace(alone, out=tmp_path / "both"), free_port()
    if finished:
        run_grid(replace(both, limit=finished))
    for process in [start(both, rank, 2, port) for rank in range(2)]:
        process.join(60)
        assert process.exitcode == 0
    assert {path: read(both.out / path) for path in expected} == expected
    shares = [len(path.read_text().splitlines()) for path in sorted(both.out.glob("*/scenes_gqa/samples-?-of-2.jsonl"))]
    assert len(shares) == 2
    assert min(shares) > 0


def test_prompts_that_lost_a_region_are_said_and_recorded(scenes, tmp_path):
    """Once per arm and task; reports count them."""
    settings = {"eviction": "streaming_llm", "eviction_keep": "3tokens", "eviction_options": {"sinks": 0}}
    blind = ArmSpec(adapter=WHOLE.adapter, scope="all", **settings)
    said: list[str] = []
    folder = run_grid(scenes_grid(scenes, tmp_path, blind, limit=4, batch_size=2), say=said.append)[0]
    assert sum("visual (4 of 4 prompts)" in line for line in said) == 1
    assert all(record.emptied["visual"] == 6 for record in read_samples(folder).values())
    assert make_tables(read_results([folder.parents[1]]))[0].rows[0].flags[0] == (
        "nothing is left of a whole region in some layer of 4 of 4 prompts"
    )


def test_more_samples_may_be_asked_later_and_no_others(scenes, tmp_path, asked):
    """The manifest says who answered what; fewer samples, and answers to another prompt, are refused."""
    grid = scenes_grid(scenes, tmp_path / "out", ROUTED, limit=3, paper={"tiny_fastv25_s16k4": {"scenes_gqa": 61.5}})
    (folder,) = run_grid(grid)
    manifest = Manifest.read(folder)
    assert manifest.paper == 61.5
    assert (manifest.rows, manifest.task, manifest.source) == (3, "scenes_gqa", str(scenes))
    assert (manifest.arm.groups, manifest.arm.acts, manifest.arm.trained) == ("S16K4 linear", "in prefill", True)
    assert manifest.settings["dtype"] == "float32"
    assert len(asked) == len(read_samples(folder)) == 3
    asked.clear()
    assert run_grid(replace(grid, limit=7)) == [folder]
    assert len(asked) == 4
    assert Manifest.read(folder).rows == len(read_samples(folder)) == 7
    refuses("raise limit", run_grid, grid)
    assert Manifest.read(folder).rows == 7
    path = next(folder.glob("samples-*"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["prompt_sha256"] = "0" * 64
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    refuses("with another prompt", run_grid, replace(grid, limit=7))


def test_what_cannot_run_is_said_before_files_are_read(scenes, tmp_path):
    from filelock import FileLock

    grid = scenes_grid(tmp_path / "nowhere", tmp_path / "out", ROUTED)
    with pytest.raises(ValueError, match=r"asks about texts, but the model of arm .* reads images"):
        run_grid(replace(grid, tasks=(TaskSpec("recall", options={"contexts": 1}),)))
    refuses("unknown task 'recal'", lambda: run_grid(replace(grid, tasks=(*grid.tasks, TaskSpec("recal")))))
    assert not list(grid.out.glob("*/*"))
    with FileLock(tmp_path / ".lock"), pytest.raises(ValueError, match="another evaluation is writing to"):
        run_grid(scenes_grid(scenes, tmp_path, ROUTED))


ADAPTER = str(resource("checkpoints/adapters/tiny_lora_only"))


@pytest.mark.slow
def test_scenes_are_read_where_they_were_made(tmp_path, capsys):
    argv = ["evaluate", "--adapter", ADAPTER, "--tasks", "scenes_pope", "--limit", "2", "--out", "results/x"]
    assert main(argv) == 2
    assert "data/scenes is read unless a folder is named: subtoken-train data scenes" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    write_scenes("data/scenes", train=1, dev=1, test=10)
    assert main(argv) == 0, capsys.readouterr().err
    (folder,) = Path("results/x").glob("*/scenes_pope")
    assert Manifest.read(folder).source == "data/scenes"


EVICTED = replace(WHOLE, name="arm", eviction="snapkv", eviction_keep=0.25, scope="visual")
REDUCED = replace(WHOLE, name="arm", reducer="random", keep_ratio=0.25)


@pytest.fixture
def own_scenes(tmp_path):
    write_scene_split(tmp_path / "scenes", "test", 60, seed=3)
    return tmp_path / "scenes"


@pytest.mark.slow
def test_another_training_or_other_answers_in_the_files_are_refused(own_scenes, tmp_path):
    adapter = shutil.copytree(resolve(str(ROUTED.adapter)), tmp_path / "adapter")
    grid = scenes_grid(own_scenes, tmp_path / "out", replace(ROUTED, adapter=str(adapter)), limit=2)
    (folder,) = run_grid(grid)
    content = (own_scenes / "test.json").read_text()
    other = json.loads(content)
    for record in other:
        record["conversations"][1]["value"] = "another"
    (own_scenes / "test.json").write_text(json.dumps(other))
    refuses("answers to other samples", run_grid, replace(grid, limit=4))
    (own_scenes / "test.json").write_text(content)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    refuses(r"adapter_sha256.*choose another results folder", run_grid, replace(grid, limit=4))
    assert len(read_samples(folder)) == Manifest.read(folder).rows == 2


@sampled(
    ("first", "second", "name"),
    [
        (EVICTED, replace(EVICTED, eviction_options={"window": 2}), "eviction_options"),
        (REDUCED, replace(REDUCED, reducer_options={"seed": 1}), "reducer"),
        (replace(ROUTED, name="arm"), replace(ROUTED, name="arm", selector="none"), r"arm\.groups"),
    ],
    every=2,
)
def test_settings_that_the_facts_do_not_tell_are_compared(own_scenes, tmp_path, first, second, name):
    grid = scenes_grid(own_scenes, tmp_path / "out", first, limit=2)
    run_grid(grid)
    run_grid(replace(grid, limit=3))
    refuses(f"holds answers with {name}", run_grid, replace(grid, arms=(second,), limit=3))
    refuses("holds answers with max_length", run_grid, replace(grid, max_length=100))


@sampled("method", ["prefixkv", "fitprune"], every=2)
def test_a_calibration_file_that_changed_is_noticed(own_scenes, tmp_path, method):
    """The setting names the same path; another content gives other answers. An eviction's or a reducer's."""
    family = load_backbone(str(WHOLE.adapter)).family
    layers, identity = family.shape.num_layers, identify(family, BackboneConfig(path="its own"))

    def calibrated(share):
        row = [1.0, *[share] * (layers - 1)]
        numbers = LayerShares([0.5], [[share] * layers]) if method == "prefixkv" else PruneSchedules([row])
        return written(tmp_path / "numbers.json", method, numbers, identity)

    options = {"calibration": calibrated(0.5)}
    evicts = {"eviction": method, "eviction_options": options}
    reduces = {"name": "arm", "reducer": method, "keep_ratio": 0.9, "reducer_options": options}
    arm = replace(EVICTED, **evicts) if method == "prefixkv" else replace(WHOLE, **reduces)
    grid = scenes_grid(own_scenes, tmp_path / "out", arm, limit=2)
    (folder,) = run_grid(grid)
    run_grid(replace(grid, limit=3))
    calibrated(0.4)
    refuses(r"holds answers with calibration_sha256", run_grid, replace(grid, limit=4))
    assert len(Manifest.read(folder).settings["calibration_sha256"]) == 64


@pytest.mark.slow
def test_records_of_version_0_1_are_joined(own_scenes, tmp_path):
    """They name the settings of every reducer."""
    grid = scenes_grid(own_scenes, tmp_path / "out", REDUCED, limit=2)
    (folder,) = run_grid(grid)
    path = folder / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    now = {"name": "random", "keep_ratio": 0.25, "round_up": False, "matches": None, "seed": 0}
    assert manifest["settings"]["reducer"] == now
    del manifest["settings"]["reducer"]["matches"]
    others = {"stage": "embeds", "layer": 2, "page_size": 16, "window": 64}
    path.write_text(
        json.dumps(
            {**manifest, "settings": {**manifest["settings"], "reducer": {**manifest["settings"]["reducer"], **others}}}
        )
    )
    run_grid(replace(grid, limit=3))
    assert len(read_samples(folder)) == 3


@pytest.mark.slow
def test_a_trained_anchor_may_come_later(own_scenes, tmp_path):
    """The answers stay, and are compared with it from then on."""
    grid = scenes_grid(own_scenes, tmp_path / "out", ROUTED, limit=2, anchors="auto")
    folder, _ = run_grid(grid)
    before = read_samples(folder)
    run_grid(replace(grid, arms=(ROUTED, ANCHOR)))
    assert Manifest.read(folder).arm.anchor == "tiny_fastv25_s16k4_anchor-seed0"
    assert read_samples(folder) == before


def test_a_random_control_of_each_training_has_that_training_s_seed(tmp_path):
    """So that a report takes both as seeds of one arm."""
    adapter = shutil.copytree(resolve(str(ROUTED.adapter)), tmp_path / "adapter")
    config = json.loads((adapter / "subtoken_config.json").read_text())
    config["training"] |= {"name": "tiny_fastv25_s16k4-seed1", "seed": 1}
    (adapter / "subtoken_config.json").write_text(json.dumps(config))
    drawn = replace(ROUTED, selector="random")
    arms = prepare([drawn, replace(drawn, adapter=str(adapter)), replace(drawn, seed=7)], ModelPool())
    assert [arm.facts.seed for arm in arms] == [0, 1, 7]
