"""The shipped grids can be run as they are: their arms have recipes, their tasks exist, tables are the paper's."""

import csv
from pathlib import Path

import yaml

from subtoken_train.evaluation.runner.dry_run import check_lines, dry_run, planned_adapter
from subtoken_train.evaluation.runner.spec import read_grid
from subtoken_train.resources import recipe_text
from tests.recipes.backbones import BACKBONES
from tests.support.places import RECIPES, recipe
from tests.support.sampling import sampled

GRIDS = sorted((RECIPES / "eval").glob("*.yaml"))
PAPER_GRIDS = {
    "table1_llava7b": ("1", "LLaVA-1.5-7B"), "table1_llava13b": ("1", "LLaVA-1.5-13B"),
    "table2_qwenvl3b": ("2", "Qwen2.5-VL-3B"), "table2_qwenvl7b": ("2", "Qwen2.5-VL-7B"),
    "table3_llama7b": ("3", "LLaMA-2-7B"), "table3_qwen7b": ("3", "Qwen2.5-7B"),
    "table4_llava7b": ("4", "LLaVA-1.5-7B"),
}  # fmt: skip
FULL = ("table3_llama7b", "table3_qwen7b")
"""Grids of the paper with an arm that nothing was trained for."""
OF_IMAGES = ["mmbench", "textvqa", "gqa", "pope", "mme", "scienceqa", "vqav2"]
PAPER_TASKS = {"1": OF_IMAGES, "2": OF_IMAGES, "3": ["mmlu"], "4": OF_IMAGES}


def recipe_of(adapter):
    """The recipe of ``runs/NAME/adapter``, or None for a shipped adapter."""
    parts = Path(adapter).parts
    if parts[:2] == ("checkpoints", "adapters"):
        return None
    assert parts[0] == "runs"
    assert parts[2:] == ("adapter",)
    return recipe(parts[1])


def budget_of(recipe):
    """Reducer, share of the tokens in percent (two decimals), S and K, as the recipe has them."""
    model = yaml.safe_load(recipe_text(recipe))["model"]
    reducer, routing = model["reducer"], model.get("routing") or {}
    keep = 100 if reducer["name"] == "none" else 100 * reducer["keep_ratio"]
    return reducer["name"], round(keep, 2), routing.get("num_groups", 0), routing.get("kept_groups", 0)


def printed_budgets(table, model):
    """The same of the paper's rows."""
    with (RECIPES / "paper_rows.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["table"], row["model"]) == (table, model)]
    groups = [tuple(int(row[name] or 0) for name in ("num_groups", "kept_groups")) for row in rows]
    shares = [(row["reducer"].lower() or "none", round(float(row["token_keep"]), 2)) for row in rows]
    return [(*share, *own) for share, own in zip(shares, groups, strict=True)]


@sampled("name", PAPER_GRIDS, every=7)
def test_table_has_the_papers_arms(name):
    table, model = PAPER_GRIDS[name]
    grid = read_grid(RECIPES / "eval" / f"{name}.yaml")
    alone = [arm.backbone for arm in grid.arms if arm.adapter is None]
    assert alone == ([BACKBONES[name.partition("_")[2]].path] if name in FULL else [])  # the row Full KV
    trained = [arm.adapter for arm in grid.arms if arm.adapter is not None]
    budgets = [*(("none", 100, 0, 0) for _ in alone), *(budget_of(recipe_of(adapter)) for adapter in trained)]
    assert sorted(budgets) == sorted(printed_budgets(table, model))
    assert all(adapter.startswith(f"runs/{name.partition('_')[2]}_") for adapter in trained)
    assert not any(arm.overrides or arm.eviction or arm.name for arm in grid.arms)
    assert [task.name for task in grid.tasks] == PAPER_TASKS[table]


@sampled("path", GRIDS, every=16, ids=lambda path: path.stem)
def test_dry_run_passes(path):
    grid = read_grid(path)
    checked = dry_run(grid, planned_adapter)
    arms = [planned.arm for planned in checked.arms]
    assert [arm.spec.adapter for arm in arms[: len(grid.arms)]] == [spec.adapter for spec in grid.arms]
    asked = [arm for arm in arms[: len(grid.arms)] if arm.spec.eviction and arm.spec.selector is None]
    for arm in asked:
        whole = 1.0 if arm.reducer.acts or arm.routing else float(arm.spec.eviction_keep)
        assert arm.facts.nominal_kv <= whole + 1e-9
    assert all(planned.laid_out.weights > 0 and planned.dense >= planned.kept > 0 for planned in checked.arms)
    assert all(samples == task.expected_rows for task, samples in checked.tasks)
    lines = check_lines(grid, checked)
    assert lines[0].startswith(f"{len(arms)} arms x {len(grid.tasks)} tasks")
    absent = {spec.adapter for spec in grid.arms if spec.adapter and spec.adapter.startswith("runs/")}
    said = "\n".join(lines)
    assert all(f"adapter {name}: subtoken-train fit --config {Path(name).parent.name}" in said for name in absent)
