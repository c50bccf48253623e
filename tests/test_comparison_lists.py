"""Lists of arms: what a file may say, and that the shipped ones name recipes whose budgets are comparable."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import arm_training
from benchmarks.arm_training import Trainer
from benchmarks.comparison_lists import ArmPlan, Questions, plain_arm, read_comparison
from benchmarks.comparison_tables import Arm, comparison_markdown, long_rows, trials_markdown
from subtoken_train.datasets.scenes import KINDS
from tests.support.places import RECIPES, run_recipes

LISTS = sorted((RECIPES / "ablations").glob("*.yaml"))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_listed_arms_are_recipes(path):
    comparison = read_comparison(path)
    assert {arm.recipe for arm in comparison.arms.values()} <= {path.stem for path in run_recipes()}


def drawn(folder, content, **scores):
    """A list, and arms whose every question has one score, by arm and seed."""
    (folder / "list.yaml").write_text(content)
    kinds = np.array(KINDS)
    every = {name: np.array([[score] * len(kinds) for score in seeds.values()]) for name, seeds in scores.items()}
    arms = {name: Arm(name, tuple(scores[name]), own, kinds, "1/4", 0.25, 0.25) for name, own in every.items()}
    return arms, read_comparison(folder / "list.yaml")


def test_a_table_has_the_rows_and_differences_of_its_list(tmp_path):
    """Paired over the seeds that both have; an arm without records is left out; ``groups`` leave no single kinds."""
    content = "arms: {a: first, b: second, c: third}\ndifferences: [[a, b], [a, c]]\ngroups: [questions]\n"
    arms, listed = drawn(tmp_path, content, a={0: 0.75, 1: 0.25}, b={0: 0.5})
    rows = comparison_markdown(arms, listed).splitlines()
    assert rows[0] == "| arm | KV | seeds | questions |"
    assert rows[2].startswith("| first | 25.0% | 2 | 50.0 [")
    assert rows[3:] == ["| second | 25.0% | 1 | 50.0 [50.0, 50.0] |"]
    assert trials_markdown(arms, listed).splitlines()[2:] == ["| first - second | 1 | +25.0 [+25.0, +25.0] |"]
    (row,) = [row for row in long_rows("x", arms, listed) if row["less"]]
    assert (row["arm"], row["less"], row["seeds"], row["measure"], row["mean"]) == ("first", "second", 1, "score", 0.25)


def test_arms_take_the_lists_training_and_their_own_settings(tmp_path):
    """An arm that is reduced at evaluation is not trained: the list's training is not its own."""
    path = tmp_path / "list.yaml"
    path.write_text(
        "folder: long\nquestions: {split: dev, seed: 3, count: 40}\n"
        "training: {trainer.max_steps: 9, data.group_by_length: false}\n"
        "arms:\n  a: whole\n"
        "  b: {words: frozen, recipe: a, settings: {model.reducer.ranking: frozen, trainer.max_steps: 7}}\n"
        "  c: {words: later, recipe: d, adapter_of: a}\ndifferences: [[b, a]]\n"
    )
    comparison = read_comparison(path)
    assert (comparison.folder, comparison.questions) == ("long", Questions("dev", 3, 40))
    trained = {"trainer.max_steps": 9, "data.group_by_length": False}
    assert list(comparison.arms.values()) == [
        ArmPlan("a", "whole", "a", trained),
        ArmPlan("b", "frozen", "a", {**trained, "model.reducer.ranking": "frozen", "trainer.max_steps": 7}),
        ArmPlan("c", "later", "d", {}, "a"),
    ]
    flags = comparison.arms["b"].flags()
    assert flags[:4] == ["--trainer.max_steps", "7", "--data.group_by_length", "false"]
    assert flags[4:] == ["--model.reducer.ranking", "frozen"]
    contents = {arm.content({"model": {}}) for arm in comparison.arms.values()}
    assert len(contents) == 3
    of = ArmPlan("a", "whole", "a").content
    assert of({"model": {"reducer": {"keep_ratio": 0.1}}}) != of({"model": {"reducer": {"keep_ratio": 0.2}}})
    matched = {"model": {"reducer": {"keep_ratio": 0.1, "matches": 0.2}}}
    assert of(matched) == of({"model": {"reducer": {"keep_ratio": 0.1}}})


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
