"""Grids: what is read and refused of them, and those of the paper's tables."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
import yaml

from subtoken_train.evaluation.results import read_samples
from subtoken_train.evaluation.runner import spec as suites
from subtoken_train.evaluation.runner.arms import load_arm, prepare
from subtoken_train.evaluation.runner.cell import ONE, make_cell, run_cell
from subtoken_train.evaluation.runner.run import read_tasks
from subtoken_train.evaluation.runner.spec import ArmSpec, Grid, TaskSpec, read_grid, suite
from subtoken_train.evaluation.tasks import build_task
from subtoken_train.inference.pool import ModelPool
from subtoken_train.reducers import build_reducer
from subtoken_train.resources import recipe_text
from subtoken_train.types import Region
from tests.support import places
from tests.support.prompt_views import context_view
from tests.support.refusals import refuses

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
    refuses(r"task local: 1 of 3 images are missing \(first: .*2\.png\)", read_tasks, replace(grid, limit=None))


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


@pytest.mark.parametrize("grid", ["table3_llama7b", "table3_qwen7b"])
def test_every_subject_is_served_and_matched_arms_are_less_than_a_token_apart(shared, grid):
    lengths = prefix_lengths(shared / "realdata/mmlu")
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
