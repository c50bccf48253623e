"""Grids as files, arms and suites: what they expand to, and how mistakes are worded."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from subtoken_train.evaluation.runner import spec as suites
from subtoken_train.evaluation.runner.run import read_tasks
from subtoken_train.evaluation.runner.spec import ArmSpec, Grid, TaskSpec, read_grid, suite

GRID = {"out": "results/x", "tasks": ["recall"], "arms": [{"adapter": "a"}]}


def write(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "grid.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_reads_everything(tmp_path):
    content = {
        **GRID, "data_root": "data/b", "limit": 5, "batch_size": 2, "max_length": 99, "anchors": "none",
        "tasks": ["recall", {"name": "textvqa", "source": "somewhere", "ocr": False}],
        "arms": [{"adapter": ["a", "b"], "eviction": "snapkv", "eviction_keep": [0.1, "20MB"]}],
    }  # fmt: skip
    grid = read_grid(write(tmp_path, content))
    assert grid.tasks == (TaskSpec("recall"), TaskSpec("textvqa", "somewhere", {"ocr": False}))
    assert [(arm.adapter, arm.eviction_keep) for arm in grid.arms] == [
        ("a", 0.1), ("a", "20MB"), ("b", 0.1), ("b", "20MB"),
    ]  # fmt: skip
    settings = (grid.out, grid.data_root, grid.limit, grid.batch_size, grid.max_length, grid.anchors)
    assert settings == (Path("results/x"), Path("data/b"), 5, 2, 99, "none")


def test_overrides_replace_what_the_file_says(tmp_path):
    grid = read_grid(write(tmp_path, GRID), out=Path("elsewhere"), limit=3, batch_size=None)
    assert (grid.out, grid.limit, grid.batch_size) == (Path("elsewhere"), 3, 16)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("arms: [", "invalid YAML"), ("- a", "it must be a group of keys"),
        ({**GRID, "arm": []}, "unknown key.*'arm'.*Did you mean 'arms'"),
        ({**GRID, "arms": {}}, "arms is {}; it must be a list"), ({**GRID, "arms": []}, "a grid needs arms"),
        ({**GRID, "tasks": []}, "a grid needs tasks"), ({**GRID, "out": 3}, "out is 3; it must be a text"),
        ({**GRID, "out": ""}, "out must name the results folder"),
        ({**GRID, "arms": [{"adapter": "a", "name": 3}]}, "name of an arm must be text; got 3"),
        ({**GRID, "arms": [{"adapter": "a", "name": ".."}]}, "also names a file"),
        ({**GRID, "arms": [{"adapter": "a", "name": ""}]}, "name of an arm must be text"),
        ({**GRID, "arms": [{"adapter": "a", "seed": 1}]}, "seed 1 must be a whole number, of a reducer"),
        ({**GRID, "arms": [{"adapter": "a", "selector": "random", "seed": "x"}]}, "seed 'x' must be a whole number"),
        ({**GRID, "limit": 0}, "limit is 0; it must be 1 or more"),
        ({**GRID, "anchors": "some"}, "unknown anchors 'some'"),
        ({**GRID, "arms": ["a"]}, "an arm must be a mapping"),
        ({**GRID, "arms": [{"adaptor": "a"}]}, "unknown key of an arm 'adaptor'.*Did you mean 'adapter'"),
        ({**GRID, "arms": [{"name": "a"}]}, "give adapter: DIR, or backbone: PATH"),
        ({**GRID, "arms": [{"adapter": []}]}, "empty list"),
        ({**GRID, "arms": [{"adapter": ["a", "b"], "name": "one"}]}, "stands for several"),
        ({**GRID, "arms": [{"adapter": "a", "eviction": "snapkv"}]}, "eviction: snapkv needs eviction_keep"),
        ({**GRID, "arms": [{"adapter": "a", "eviction_keep": 0.1}]}, "_options and scope need eviction: NAME"),
        ({**GRID, "arms": [{"adapter": "a", "protocol": "blind"}]}, "unknown protocol 'blind'"),
        ({**GRID, "arms": [{"backbone": "a", "reducer": "fastv"}]}, "arm a: reducer and keep_ratio go together"),
        ({**GRID, "arms": [{"backbone": "a", "selector": "random"}]}, "needs groups, S and K"),
        ({**GRID, "arms": [{"adapter": "a", "groups": "8,2"}]}, "groups is for a backbone alone; a is an adapter"),
        ({**GRID, "arms": [{"adapter": "a", "selector": "value_norm", "seed": 1}]}, "that draws: random or static"),
        ({**GRID, "tasks": [3]}, "a task is a name"),
        ({**GRID, "tasks": [{"name": "pope", "source": 3}]}, "source of task pope must be a folder or a Hub id"),
        ({**GRID, "tasks": ["recall", "recall"]}, "listed twice"),
        ({**GRID, "paper": {"b": {"recall": 1.0}}}, "unknown arm of paper 'b'.*a"),
        ({**GRID, "paper": {"a": {"recal": 1.0}}}, "unknown task of paper: a 'recal'. Did you mean 'recall'"),
        ({**GRID, "paper": {"a": {"recall": "72 %"}}}, "recall is '72 %'; it must be a number"),
    ],
)  # fmt: skip
def test_mistakes_are_worded(tmp_path, content, message):
    with pytest.raises(ValueError, match=f"{message}.*'subtoken-train recipes show mini_recall' prints a whole grid"):
        read_grid(write(tmp_path, content))


def test_a_limit_asks_for_its_own_images_only(tmp_path):
    lines = [{"image": f"{n}.png", "question": "What?", "answers": "cat", "metric": "contains"} for n in range(3)]
    (tmp_path / "local.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for n in range(2):
        (tmp_path / f"{n}.png").write_bytes(b"not opened here")
    grid = Grid((ArmSpec(adapter="a"),), (TaskSpec("local", source=str(tmp_path)),), Path("out"), limit=2)
    ((_, samples),) = read_tasks(grid)
    assert [sample.id for sample in samples] == ["1", "2"]
    with pytest.raises(ValueError, match=r"task local: 1 of 3 images are missing \(first: .*2\.png\)"):
        read_tasks(replace(grid, limit=None))


def test_processes_that_start_together_write_the_scenes_once(tmp_path, monkeypatch):
    written = []

    def write(folder, split, count, seed):
        written.append((split, count, seed))
        time.sleep(0.3)
        folder.mkdir()
        (folder / "test.json").write_text("[]")

    monkeypatch.setattr("subtoken_train.datasets.scenes.write_scene_split", write)
    with ThreadPoolExecutor(2) as threads:
        grids = list(threads.map(lambda _: suite("mini", tmp_path), range(2)))
    assert written == [("test", suites.SCENES, 1)]
    for images, text in grids:
        assert {task.source for task in images.tasks} == {str(tmp_path / "data/scenes")}
        assert [task.source for task in text.tasks] == [None]
        assert images.out == text.out == tmp_path
