"""A grid runs, stops and goes on without repeating or losing anything; known answers on the shipped models."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from subtoken_train.cli.main import main
from subtoken_train.datasets.scenes import write_scene_split, write_scenes
from subtoken_train.evaluation.reporting.runs import read_results
from subtoken_train.evaluation.reporting.score_tables import make_tables
from subtoken_train.evaluation.results import Manifest, read_samples
from subtoken_train.evaluation.runner import cell
from subtoken_train.evaluation.runner.run import run_grid
from subtoken_train.evaluation.runner.spec import ArmSpec, TaskSpec
from subtoken_train.resources import resource
from tests.support.eval_runs import ROUTED, WHOLE, answers, free_port, records, scenes_grid, start
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
    while written(cut.out) < total // 4 and process.is_alive():
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    kept = written(cut.out)
    assert 0 < kept < total
    with next(cut.out.glob("*/*/samples-*")).open("a") as file:
        file.write('{"id": "half a li')  # a line that the kill cut off
    asked.clear()
    found = {folder.relative_to(cut.out): records(folder) for folder in run_grid(cut)}
    assert found == expected
    assert len(asked) == total - kept
    asked.clear()
    assert run_grid(cut)
    assert asked == []


def written(folder) -> int:
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
    paper = {"tiny_fastv25_s16k4": {"scenes_gqa": 61.5}}
    grid = scenes_grid(scenes, tmp_path / "out", ROUTED, limit=3, paper=paper)
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
    with pytest.raises(ValueError, match="raise limit"):
        run_grid(grid)
    assert Manifest.read(folder).rows == 7
    path = next(folder.glob("samples-*"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["prompt_sha256"] = "0" * 64
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="with another prompt"):
        run_grid(replace(grid, limit=7))


def test_what_cannot_run_is_said_before_files_are_read(scenes, tmp_path):
    from filelock import FileLock

    grid = scenes_grid(tmp_path / "nowhere", tmp_path / "out", ROUTED)
    with pytest.raises(ValueError, match=r"asks about texts, but the model of arm .* reads images"):
        run_grid(replace(grid, tasks=(TaskSpec("recall", options={"contexts": 1}),)))
    with pytest.raises(ValueError, match="unknown task 'recal'"):
        run_grid(replace(grid, tasks=(*grid.tasks, TaskSpec("recal"))))
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
