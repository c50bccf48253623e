"""Recipes made from bases have the settings of their own files; rows of the paper's tables; grids run as they are."""

import csv
import hashlib
import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
import yaml

from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.trainer_parts import KINDS
from subtoken_train.evaluation.runner.dry_run import check_lines, dry_run, planned_adapter
from subtoken_train.evaluation.runner.spec import read_grid
from subtoken_train.ledger.kv_budget import KVBudget, geometry
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.reducers import build_reducer
from subtoken_train.resources import NamedRecipe, read_names, recipe_text
from subtoken_train.training.preflight import count_devices
from tests.recipes.backbones import BACKBONES
from tests.support.commands import printed
from tests.support.places import RECIPES, ROOT, recipe, run_recipes
from tests.support.sampling import sampled

with (Path(__file__).parent / "settings_digests.csv").open(encoding="utf-8") as file:
    DIGESTS = {row["name"]: row["sha256"] for row in csv.DictReader(file)}
"""sha256 of each recipe's parsed settings as JSON with sorted keys, taken when every recipe was a file of its own."""
BASE = """\
# Tiny · 25 %
#   train   fit --config recipes/tiny_a25_s4k1.yaml
output_dir: runs/tiny_a25_s4k1
model:
  stage2: null                # none
  first: runs/tiny_a25/adapter
  reducer:
    keep: 0.25                # 16 of 64
    # of the reducer
  routing: {groups: 4}

data: 1
"""


def test_every_recipe_has_the_settings_of_its_file(capsys):
    assert {path.stem for path in run_recipes()} == set(DIGESTS)
    for name, digest in DIGESTS.items():
        settings = yaml.safe_load(printed(capsys, "recipes", "show", name))
        assert hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest() == digest, name


def test_bases_are_files_and_no_name_is_one():
    names = read_names(RECIPES)
    assert len(names) == 244
    assert all(recipe(row.base).is_file() and not recipe(row.name).exists() for row in names.values())
    assert list(names) == sorted(names)
    assert read_names(RECIPES)["llava7b_fastv25_s8k2"].base == "llava7b_fastv25_s16k4"


@pytest.mark.parametrize(
    ("name", "settings", "lines"),
    [
        ("tiny_a25_s8k2", "model.reducer.keep=0.125", {"output_dir: runs/tiny_a25_s8k2", "    keep: 0.125"}),
        ("tiny_a12p5_s4k1", "", {"  first: runs/tiny_a12p5/adapter", "    keep: 0.25                # 16 of 64"}),
        ("tiny_a", "model.stage2.lora.rank=4", {"  stage2:", "    lora:", "      rank: 4"}),
        ("tiny_a", "model.reducer- data=2", {"  routing: {groups: 4}", "data: 2"}),
        ("tiny_a", "model.reducer.new=[x]", {"    # of the reducer", "    new: [x]"}),
    ],
)
def test_settings_replace_add_and_remove_lines(name, settings, lines):
    made = NamedRecipe(name, "tiny_a25_s4k1", settings, "New").text(BASE).split("\n")
    assert made[0] == "# New"
    assert f"#   train   fit --config recipes/{name}.yaml" in made
    assert made[2] == "# Made from recipes/tiny_a25_s4k1.yaml by its line of recipes/names.csv."
    assert lines <= set(made)
    assert ("reducer" in yaml.safe_load("\n".join(made))["model"]) == ("reducer-" not in settings)


GRID_PAGE = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")


def test_its_grid_can_be_read(tmp_path):
    text = GRID_PAGE.partition("## The grid file\n")[2].partition("```yaml\n")[2].partition("```")[0]
    path = tmp_path / "grid.yaml"
    path.write_text(text, encoding="utf-8")
    grid = read_grid(path)
    assert len(grid.arms) == 8
    assert [task.name for task in grid.tasks] == ["scenes_pope", "scenes_textvqa"]


OVERLAYS = sorted((RECIPES / "strategy").glob("*.yaml"))
PAPER = recipe("llava7b_fastv25_s16k4")


def test_every_strategy_has_an_overlay():
    assert {path.stem for path in OVERLAYS} - {"slurm"} == set(KINDS["strategy"].names) - {"auto"}


@sampled("path", OVERLAYS, every=4, ids=lambda path: path.stem)
def test_an_overlay_on_a_recipe(path):
    text = path.read_text()
    assert text.startswith("# overlay · ")
    assert f"recipes/strategy/{path.stem}." in text
    assert list(yaml.safe_load(text)) == ["trainer"]
    plain = RecipeCLI(["--config", str(PAPER)]).config
    laid_over = RecipeCLI(["--config", str(PAPER), "--config", str(path)]).config
    assert laid_over.trainer.strategy == ("ddp" if path.stem == "slurm" else path.stem)
    assert laid_over.model == plain.model

    def records(config) -> int:
        trainer = config.trainer
        processes = count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes)
        return processes * config.data.batch_size * trainer.accumulate_grad_batches

    assert records(laid_over) == records(plain)


def test_the_batch_script_starts_what_its_overlay_says():
    script = (RECIPES / "strategy" / "slurm.sbatch").read_text()
    trainer = yaml.safe_load((RECIPES / "strategy" / "slurm.yaml").read_text())["trainer"]
    asked = {name: int(value) for name, value in re.findall(r"#SBATCH --([\w-]+)=(\d+)\n", script)}
    assert asked["nodes"] == trainer["num_nodes"]
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] == trainer["devices"]


DIGEST = "3f2f11d1a5e085777e99898f818f4f6e22636cb05249eab064b37b94d8b92a05"
"""sha256 of recipes/paper_rows.csv: the rows of Tables 1 to 4 as published."""
TABLES = {
    "llama7b_quest25_s16k12": {
        "model.lora": {"rank": 32, "alpha": 16, "dropout": 0.05},
        "model.optimizer": {"learning_rate": 3e-5, "weight_decay": 0.01, "warmup_steps": 4000, "schedule": "cosine"},
        "model.reducer": {"page_size": 16, "window": 64},
        "model.routing": {"balance_weight": 0.01, "query_conditioned": True, "budget": "global"},
        "data": {"block_length": 2048, "context_length": 1024}, "trainer": {"max_steps": 25_000},
    },
    "llava7b_fastv25_s16k4": {
        "model.lora": {"rank": 16, "alpha": 32, "dropout": 0.05},
        "model.optimizer": {"learning_rate": 2e-4, "weight_decay": 0.0, "warmup_steps": 1000},
        "model.routing": {"balance_weight": 0.01},
        "data": {"max_length": 2048, "train_file": "data/llava/llava_v1_5_mix665k.json"},
        "trainer": {"max_steps": 10_000},
    },
}  # fmt: skip
"""Settings of the paper's Tables 5 and 7."""


def rows():
    """The rows of Tables 1 to 4."""
    with (RECIPES / "paper_rows.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_rows_have_the_committed_digest():
    assert hashlib.sha256((RECIPES / "paper_rows.csv").read_bytes()).hexdigest() == DIGEST


def test_rows_are_the_papers(shared):
    tables = json.loads((shared / "paper_tables.json").read_text())
    published = [*tables["vlm_rows"], *tables["llm_rows"]]
    assert len(rows()) == len(published) == 119
    for row, source in zip(rows(), published, strict=True):
        for key in ("table", "model", "method", "variant"):
            assert row[key] == source[key]
        for key, name in (("num_groups", "S"), ("kept_groups", "K"), ("reducer", "token_method")):
            assert row[key] == ("" if source[name] is None else str(source[name]))
        for key in ("token_keep", "total_kv"):
            assert float(row[key]) == source[key]


@pytest.mark.parametrize("name", TABLES)
def test_the_recipe_has_the_settings_of_its_table(name):
    """All others are made of these two, and pinned by their digests."""
    content = yaml.safe_load(recipe_text(recipe(name)))
    for key, wanted in TABLES[name].items():
        band = content
        for group in key.split("."):
            band = band[group]
        assert {each: band.get(each) for each in wanted} == wanted, key


def test_every_row_has_its_recipe_and_its_percentage_from_the_ledger():
    """r (1 + K/S) / 2, printed to three decimals; the anchor's tokens hold those bytes and less than a token more."""
    names = {backbone.words: name for name, backbone in BACKBONES.items()}
    for row in rows():
        if row["variant"] in ("lora_only", "full", "token_only"):
            continue
        groups, keep = (int(row["num_groups"]), int(row["kept_groups"])), float(row["token_keep"]) / 100
        budget, reducer = KVBudget(keep, *groups), row["reducer"].lower()
        assert abs(100 * budget.exact_total - Fraction(row["total_kv"])) <= Fraction(1, 2000), row
        backbone = BACKBONES[names[row["model"]]]
        kept = build_reducer(reducer, keep).kept_tokens(backbone.tokens)
        ledger = nominal_ledger(geometry(backbone.shape), {"visual": backbone.tokens}, budget, kept_tokens=kept)
        assert ledger.fraction() == pytest.approx(float(budget.exact_total), abs=1e-12)
        name = f"{names[row['model']]}_{reducer}{row['token_keep'].replace('.', 'p')}_s{groups[0]}k{groups[1]}"
        assert any(path.stem.startswith(name) for path in run_recipes()), name


@sampled("path", run_recipes(), every=30, ids=lambda path: path.stem)
def test_every_recipe_passes_its_pre_flight(path, capsys):
    assert main(["check", "--config", str(path), "--offline"]) == 0
    here = "ready" if path.stem.startswith("tiny") or torch.cuda.is_available() else "valid"
    assert f"\n{here}: subtoken-train fit" in capsys.readouterr().out


@sampled(
    ("name", "lora", "routers"),
    [
        ("llava13b_visionzip12p5_s8k2", 13_107_200, 1_638_720), ("qwenvl7b_visionzip25_s16k4", 5_046_272, 1_606_080),
        ("llama7b_quest25_s8k7", 33_554_432 // 2, 2_097_408), ("qwen3vl4b_fastv12p5_s16k4", 5_898_240, 1_475_136),
        ("llavanextmistral7b_fastv12p5_s16k4", 6_815_744, 2_097_664),
        ("internvl8b_fastv25_s16k4", 5_046_272, 1_606_080), ("llavaov7b_fastv25_s16k4", 5_046_272, 1_606_080),
        ("mistralsmall24b_fastv25_s16k4", 9_830_400, 3_277_440), ("glm41v9b_fastv25_s16k4", 8_028_160, 2_622_080),
        ("smolvlm500m_fastv25_s16k4", 1_638_400, 492_032), ("qwen314b_quest12p5_s16k12", 20_971_520, 6_554_240),
    ],
    every=3,
)  # fmt: skip
def test_trainable_counts(name, lora, routers, capsys):
    out = printed(capsys, "check", "--config", str(recipe(name)), "--offline")
    assert f"{lora:,}" in next(line for line in out.splitlines() if "LoRA together" in line)
    assert f"{routers:,}" in next(line for line in out.splitlines() if "routers (" in line)


GRIDS = sorted((RECIPES / "eval").glob("*.yaml"))
PAPER_GRIDS = {
    "table1_llava7b": ("1", "LLaVA-1.5-7B"), "table1_llava13b": ("1", "LLaVA-1.5-13B"),
    "table2_qwenvl3b": ("2", "Qwen2.5-VL-3B"), "table2_qwenvl7b": ("2", "Qwen2.5-VL-7B"),
    "table3_llama7b": ("3", "LLaMA-2-7B"), "table3_qwen7b": ("3", "Qwen2.5-7B"),
    "table4_llava7b": ("4", "LLaVA-1.5-7B"),
}  # fmt: skip
FULL = ("table3_llama7b", "table3_qwen7b")  # grids of the paper with an arm that nothing was trained for
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
