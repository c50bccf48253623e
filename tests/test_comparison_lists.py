"""Lists of arms: what a file may say, and that the shipped ones name recipes whose budgets are comparable."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.comparison_lists import ArmPlan, Questions, read_comparison
from benchmarks.comparison_tables import Arm, comparison_markdown, long_rows, trials_markdown
from checkpoints.tiny_llava import VISUAL_TOKENS
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.datasets.scenes import KINDS
from subtoken_train.ledger.kv_budget import KVBudget
from tests.support.places import RECIPES, recipe, run_recipes

LISTS = sorted((RECIPES / "ablations").glob("*.yaml"))


def total_kv(name):
    """rho_total of a recipe."""
    model = RecipeCLI(["--config", str(recipe(name))]).model
    routing = model.routing_config
    budget = KVBudget() if routing is None else routing.token_budget
    return float(replace(budget, keep_ratio=model.reducer_config.keep_ratio).total_of(VISUAL_TOKENS))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_listed_arms_are_recipes(path):
    comparison = read_comparison(path)
    assert {arm.recipe for arm in comparison.arms.values()} <= {path.stem for path in run_recipes()}


@pytest.mark.slow
def test_the_two_stage_list_is_table_4():
    """Five rows per budget, after their stage 1, each against the matched anchor; all differences at equal bytes."""
    comparison = read_comparison(RECIPES / "ablations" / "two_stage_tiny.yaml")
    names = list(comparison.arms)
    for keep in ("25", "12p5"):
        variants = ("s4k1", "s8k2", "s16k4", "s16k4_mlp", "s16k4_olora")
        wanted = [f"tiny_fastv{keep}_{variant}_stage2" for variant in variants]
        start = names.index(wanted[0])
        assert names[start : start + 5] == wanted
        assert f"tiny_fastv{keep}" in names[:start]
        assert {(name, f"tiny_fastv{keep}_s16k4_anchor") for name in wanted} <= set(comparison.pairs)
    kv = {name: total_kv(name) for pair in comparison.pairs for name in pair}
    assert all(kv[first] == kv[second] for first, second in comparison.pairs)


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


def test_a_section_has_its_arms_without_their_common_words_and_their_pairs(tmp_path):
    path = tmp_path / "list.yaml"
    content = (
        "arms: {x_a: 'left: first', x_b: 'left: second', y_a: 'right: first'}\ndifferences: [[x_b, x_a], [y_a, x_a]]\n"
    )
    path.write_text(content + "sections: {one: [x_], two: [y_]}\n")
    one, two = map(read_comparison(path).section, ("one", "two"))
    assert [one.arms[name].words for name in one.own] == ["first", "second"]
    assert (one.pairs, two.pairs) == ((("x_b", "x_a"),), (("y_a", "x_a"),))
    assert [two.arms[name].words for name in ("y_a", "x_a")] == ["first", "left: first"]
    path.write_text(content + "sections: {one: [x_]}\n")
    with pytest.raises(ValueError, match="y_a must stand in one of the sections one"):
        read_comparison(path)


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


def test_the_routed_recall_asks_the_adapters_that_its_screen_trained():
    final, screen = (read_comparison(RECIPES / "ablations" / f"{name}_tiny.yaml") for name in ("routed_recall", "fill"))
    assert final.arms.keys() - screen.arms.keys() == {"lead"}  # the control
    for name in final.arms.keys() & screen.arms.keys():
        assert final.arms[name].content({"model": {}}) == screen.arms[name].content({"model": {}})
    assert final.questions != screen.questions
