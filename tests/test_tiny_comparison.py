"""benchmarks/tiny_comparison.py: what it trains, in which order, and what a second call leaves alone."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "benchmarks" / "tiny_comparison.py"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The program over two small recipes, with a ``fit`` that only writes down what it was asked."""
    specification = importlib.util.spec_from_file_location("tiny_comparison", PROGRAM)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "first.yaml").write_text("model: {routing: null}\n")
    (recipes / "second.yaml").write_text("model: {stage2: {adapter: runs/first/adapter}}\n")
    module.calls = []

    def fit(argv):
        folder = Path(argv[argv.index("--output_dir") + 1])
        module.calls.append((folder.name, argv))
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        return 0

    monkeypatch.setattr(module, "recipe_path", lambda arm: recipes / f"{arm}.yaml")
    monkeypatch.setattr(module, "subtoken", fit)
    return module


def names(program):
    return [name for name, _ in program.calls]


def test_stage_1_of_the_same_seed_is_trained_first_and_once(program, tmp_path):
    adapter, trained = program.train_arm("second", 3, tmp_path / "work")
    assert adapter == tmp_path / "work" / "second-seed3" / "adapter"
    assert trained.keys() == {"commit", "train_seconds"}
    assert names(program) == ["first-seed3", "second-seed3"]
    for _, argv in program.calls:
        assert [argv[argv.index(key) + 1] for key in ("--seed_everything", "--data.seed")] == ["3", "3"]
    assert not (tmp_path / "work" / "second-seed3" / "checkpoints").exists()
    assert program.train_arm("second", 3, tmp_path / "work") == (adapter, trained)
    program.train_arm("first", 3, tmp_path / "work")
    assert len(program.calls) == 2
    program.train_arm("second", 4, tmp_path / "work")
    assert names(program)[2:] == ["first-seed4", "second-seed4"]


def test_stage_2_is_told_where_its_stage_1_lies(program, tmp_path):
    program.train_arm("second", 0, tmp_path / "work")
    first, second = (argv for _, argv in program.calls)
    assert "--model.stage2.adapter" not in first
    place = second.index("--model.stage2.adapter")
    assert second[place + 1] == str(tmp_path / "work" / "first-seed0" / "adapter")


def test_a_changed_recipe_trains_anew_with_all_that_stands_on_it(program, tmp_path):
    program.train_arm("second", 0, tmp_path / "work")
    recipe = tmp_path / "recipes" / "first.yaml"
    recipe.write_text(recipe.read_text() + "# another\n")
    program.train_arm("second", 0, tmp_path / "work")
    assert names(program) == ["first-seed0", "second-seed0"] * 2


def test_a_training_that_fails_stops_the_program_and_is_tried_again(program, tmp_path, monkeypatch):
    with monkeypatch.context() as interrupted:
        interrupted.setattr(program, "subtoken", lambda argv: 130)
        with pytest.raises(SystemExit, match="first seed 0 did not train"):
            program.train_arm("second", 0, tmp_path / "work")
    program.train_arm("second", 0, tmp_path / "work")
    assert len(program.calls) == 2


def test_a_run_with_a_record_is_skipped(program, tmp_path):
    (tmp_path / "second-seed0.json").write_text(json.dumps({}))
    program.run_arm("second", 0, tmp_path / "data.json", tmp_path / "work", tmp_path)
    assert program.calls == []
