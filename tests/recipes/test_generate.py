"""The shipped recipes are those of the list of arms, and the list is the paper's."""

from __future__ import annotations

import csv
import hashlib
import json

import torch

from subtoken_train.cli.main import main
from tests.recipes import paper_arms
from tests.support.places import RECIPES, recipe, run_recipes
from tests.support.sampling import sampled

DIGEST = "3f2f11d1a5e085777e99898f818f4f6e22636cb05249eab064b37b94d8b92a05"
"""sha256 of recipes/paper_rows.csv: the rows of Tables 1 to 4 as published."""


def test_rows_have_the_committed_digest():
    assert hashlib.sha256((RECIPES / "paper_rows.csv").read_bytes()).hexdigest() == DIGEST


def test_rows_are_the_papers(shared):
    tables = json.loads((shared / "paper_tables.json").read_text())
    rows = list(csv.DictReader((RECIPES / "paper_rows.csv").open()))
    published = [*tables["vlm_rows"], *tables["llm_rows"]]
    assert len(rows) == len(published) == 119
    for row, source in zip(rows, published, strict=True):
        for key in ("table", "model", "method", "variant"):
            assert row[key] == source[key]
        for key, name in (("num_groups", "S"), ("kept_groups", "K"), ("reducer", "token_method")):
            assert row[key] == ("" if source[name] is None else str(source[name]))
        for key in ("token_keep", "total_kv"):
            assert float(row[key]) == source[key]


def test_every_row_has_one_recipe_at_its_budget():
    arms = {arm.name: arm for arm in paper_arms.arms()}
    assert len(arms) == 118  # 119 rows share LoRA-only arms and anchors between tables; four stage-1 adapters join them
    fractions = {}
    for arm in arms.values():
        value = arm.budget.value_fraction if arm.routed else 1
        fractions[arm.name] = 100 * arm.kept_tokens() / arm.backbone.tokens * (1 + float(value)) / 2
    assert fractions["llava7b_fastv25_s4k1"] == fractions["llava7b_visionzip25_s16k4_anchor"] == 15.625
    assert fractions["llama7b_quest25_s8k7"] == fractions["llama7b_quest25_s8k7_anchor"] == 23.4375
    assert fractions["qwen7b_quest12p5_s16k12"] == fractions["qwen7b_quest12p5_s8k6_anchor"] == 10.9375


def test_the_shipped_recipes_are_the_listed_arms():
    listed = {arm.name for arm in paper_arms.every_arm() if arm.model != "tinylm"}
    assert {path.stem for path in run_recipes() if not path.stem.startswith("tiny")} == listed
    assert {arm.name for arm in paper_arms.every_arm()} <= {path.stem for path in run_recipes()}


@sampled("path", run_recipes(), every=30, ids=lambda path: path.stem)
def test_every_recipe_passes_its_pre_flight(path, capsys):
    assert main(["check", "--config", str(path), "--offline"]) == 0
    here = "ready" if path.stem.startswith("tiny") or torch.cuda.is_available() else "valid"
    assert f"\n{here}: subtoken-train fit" in capsys.readouterr().out


@sampled(
    ("name", "lora", "routers"),
    [
        ("llava7b_fastv25_s16k4", 8_388_608, 2_097_664),
        ("llava13b_visionzip12p5_s8k2", 13_107_200, 1_638_720),
        ("qwenvl3b_fastv25_s16k4", 3_686_400, 1_180_224),
        ("qwenvl7b_visionzip25_s16k4", 5_046_272, 1_606_080),
        ("llama7b_quest25_s8k7", 33_554_432 // 2, 2_097_408),
        ("qwen7b_quest12p5_s8k6", 10_092_544, 1_605_856),
        ("qwen2vl7b_fastv25_s16k4", 5_046_272, 1_606_080),
        ("qwen3vl4b_fastv12p5_s16k4", 5_898_240, 1_475_136),
        ("qwen3vl8b_fastv25_s16k4", 7_667_712, 2_359_872),
        ("llavanext7b_fastv25_s16k4", 8_388_608, 2_097_664),
        ("llavanextmistral7b_fastv12p5_s16k4", 6_815_744, 2_097_664),
        ("internvl8b_fastv25_s16k4", 5_046_272, 1_606_080),
        ("llavaov7b_fastv25_s16k4", 5_046_272, 1_606_080),
        ("mistralsmall24b_fastv25_s16k4", 9_830_400, 3_277_440),
        ("glm41v9b_fastv25_s16k4", 8_028_160, 2_622_080),
        ("smolvlm500m_fastv25_s16k4", 1_638_400, 492_032),
        ("llama31_quest25_s16k4", 13_631_488, 4_194_816),
        ("qwen38b_quest25_s16k4", 15_335_424, 4_719_168),
        ("qwen314b_quest12p5_s16k12", 20_971_520, 6_554_240),
    ],
    every=4,
)
def test_trainable_counts(name, lora, routers, capsys):
    assert main(["check", "--config", str(recipe(name)), "--offline"]) == 0
    out = capsys.readouterr().out
    assert f"{lora:,}" in next(line for line in out.splitlines() if "LoRA together" in line)
    assert f"{routers:,}" in next(line for line in out.splitlines() if "routers (" in line)
