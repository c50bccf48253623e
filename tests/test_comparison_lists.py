"""Lists of arms: what a file may say, and that the shipped ones name recipes whose budgets are comparable."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import arm_training
from benchmarks.arm_training import Trainer
from benchmarks.comparison_lists import ArmPlan, plain_arm, read_comparison
from tests.support.places import RECIPES, run_recipes

LISTS = sorted((RECIPES / "ablations").glob("*.yaml"))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_listed_arms_are_recipes(path):
    comparison = read_comparison(path)
    assert {arm.recipe for arm in comparison.arms.values()} <= {path.stem for path in run_recipes()}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("arms: {a: x}", "must have the keys arms and differences"),
        ("arms: {a: x}\ndifferences: []\nstep: 3", "unknown key 'step'"),
        ("arms: {a: {recipe: x}}\ndifferences: []", "arms: a: words is missing"),
        ("arms: {a: {words: x, adapter_of: b}}\ndifferences: []", "a takes the adapter of b, which no arm trains"),
        ("arms: {a: {words: x, adapter_of: a}}\ndifferences: []", "a takes the adapter of a, which no arm trains"),
        ("arms: {a: x}\ndifferences: []\nquestions: {split: train, seed: 0, count: 1}", "split"),
        ("arms: {a: x}\ndifferences: [[a]]", "a pair of arms"),
        ("- a", "must have the keys"),
        ("arms: {a: x}\ndifferences: [[a, b], [c, a]]", "compares b, c, which its arms do not list"),
    ],
)
def test_wrong_lists(tmp_path, content, words):
    path = tmp_path / "list.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        read_comparison(path)


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


def test_a_changed_recipe_trains_anew_with_all_that_stands_on_it(trainer, tmp_path):
    trainer.adapter(SECOND, 0)
    recipe = tmp_path / "recipes" / "first.yaml"
    recipe.write_text(recipe.read_text() + "# a comment\n")
    trainer.adapter(SECOND, 0)
    assert trainer.names == ["first-seed0", "second-seed0"]
    recipe.write_text(recipe.read_text() + "seed_everything: 3\n")
    trainer.adapter(SECOND, 0)
    assert trainer.names == ["first-seed0", "second-seed0"] * 2
