"""benchmarks/tiny_comparison.py: what it trains, in which order, and what a second call leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import arm_training
from benchmarks.arm_training import Trainer
from benchmarks.comparison_lists import ArmPlan, plain_arm
from benchmarks.run_records import add_run
from benchmarks.tiny_comparison import run_arm

FIRST, SECOND = plain_arm("first", "one"), plain_arm("second", "two")
LATER = ArmPlan("later", "reduced at evaluation", "other", adapter_of="first")


class Calls(Trainer):
    """A trainer over two small recipes, with a ``fit`` that only writes down what it was asked."""

    def __init__(self, work):
        super().__init__({arm.name: arm for arm in (FIRST, SECOND, LATER)}, work)
        self.calls = []

    @property
    def names(self):
        return [name for name, _ in self.calls]


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "first.yaml").write_text("model: {routing: null}\n")
    (recipes / "second.yaml").write_text("model: {stage2: {adapter: runs/first/adapter}}\n")
    made = Calls(tmp_path / "work")

    def fit(argv):
        folder = Path(argv[argv.index("--output_dir") + 1])
        made.calls.append((folder.name, argv))
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        return 0

    monkeypatch.setattr(arm_training, "recipe_path", lambda recipe: recipes / f"{recipe}.yaml")
    monkeypatch.setattr(arm_training, "subtoken", fit)
    return made


def test_stage_1_of_the_same_seed_is_trained_first_and_once(trainer, tmp_path):
    adapter, trained = trainer.adapter(SECOND, 3)
    assert adapter == tmp_path / "work" / "second-seed3" / "adapter"
    assert trained.keys() == {"commit", "train_seconds"}
    assert trainer.names == ["first-seed3", "second-seed3"]
    for _, argv in trainer.calls:
        assert [argv[argv.index(key) + 1] for key in ("--seed_everything", "--data.seed")] == ["3", "3"]
    assert not (tmp_path / "work" / "second-seed3" / "checkpoints").exists()
    assert trainer.adapter(SECOND, 3) == (adapter, trained)
    trainer.adapter(FIRST, 3)
    assert len(trainer.calls) == 2
    trainer.adapter(SECOND, 4)
    assert trainer.names[2:] == ["first-seed4", "second-seed4"]


def test_stage_2_is_told_where_its_stage_1_lies(trainer, tmp_path):
    trainer.adapter(SECOND, 0)
    first, second = (argv for _, argv in trainer.calls)
    assert "--model.stage2.adapter" not in first
    place = second.index("--model.stage2.adapter")
    assert second[place + 1] == str(tmp_path / "work" / "first-seed0" / "adapter")


def test_an_arm_that_is_reduced_at_evaluation_takes_the_other_arms_adapter(trainer, tmp_path):
    assert trainer.adapter(LATER, 1)[0] == tmp_path / "work" / "first-seed1" / "adapter"
    trainer.adapter(FIRST, 1)
    assert trainer.names == ["first-seed1"]


def test_an_arms_settings_reach_fit_and_other_settings_train_anew(trainer):
    changed = ArmPlan("first", "one", "first", {"trainer.max_steps": 7, "model.routing": None})
    trainer.adapter(changed, 0)
    assert trainer.calls[0][1][-4:] == ["--trainer.max_steps", "7", "--model.routing", "null"]
    trainer.adapter(FIRST, 0)
    assert trainer.names == ["first-seed0"] * 2


def test_a_changed_recipe_trains_anew_with_all_that_stands_on_it(trainer, tmp_path):
    trainer.adapter(SECOND, 0)
    recipe = tmp_path / "recipes" / "first.yaml"
    recipe.write_text(recipe.read_text() + "# a comment\n")
    trainer.adapter(SECOND, 0)
    assert trainer.names == ["first-seed0", "second-seed0"]
    recipe.write_text(recipe.read_text() + "seed_everything: 3\n")
    trainer.adapter(SECOND, 0)
    assert trainer.names == ["first-seed0", "second-seed0"] * 2


def test_a_training_that_fails_stops_the_program_and_is_tried_again(trainer, monkeypatch):
    with monkeypatch.context() as interrupted:
        interrupted.setattr(arm_training, "subtoken", lambda argv: 130)
        with pytest.raises(SystemExit, match="first seed 0 did not train"):
            trainer.adapter(SECOND, 0)
    trainer.adapter(SECOND, 0)
    assert len(trainer.calls) == 2


def test_a_run_with_a_record_is_skipped(trainer, tmp_path):
    add_run(tmp_path, {"arm": "second", "seed": 0})
    run_arm(SECOND, 0, trainer, None, tmp_path)
    assert trainer.calls == []
