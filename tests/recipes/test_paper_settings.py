"""Recipes of the paper's rows against its Tables 5 and 7, and the ledger against the percentages that it prints."""

from __future__ import annotations

import csv
from fractions import Fraction

import pytest
import yaml

from subtoken_train.ledger.kv_budget import KVBudget, geometry
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.resources import recipe_text
from tests.recipes import paper_arms
from tests.support.places import RECIPES, recipe

TABLE_5 = {
    "lora": {"rank": 32, "alpha": 16, "dropout": 0.05},
    "optimizer": {"learning_rate": 3e-5, "weight_decay": 0.01, "warmup_steps": 4000, "schedule": "cosine"},
    "quest": {"page_size": 16, "window": 64},
    "data": {"block_length": 2048, "context_length": 1024},
    "max_steps": 25_000,
    "balance_weight": 0.01,
}
TABLE_7 = {
    "lora": {"rank": 16, "alpha": 32, "dropout": 0.05},
    "optimizer": {"learning_rate": 2e-4, "weight_decay": 0.0, "warmup_steps": 1000},
    "data": {"max_length": 2048, "train_file": "data/llava/llava_v1_5_mix665k.json"},
    "max_steps": 10_000,
    "balance_weight": 0.01,
}
PRINTED = {
    "LoRA rank 3232, scaling 1616, dropout 0.050.05",
    "Quest chunk/window size 16/6416/64",
    "Sequence length 20482048",
    "Context/query length 1024/10241024/1024",
    "Weight decay 0.010.01",
    "Warmup 40004000 steps",
    "LoRA rank 1616, scaling 3232, dropout 0.050.05",
    "Maximum sequence length 20482048",
    "Weight decay 0.00.0",
    "Warmup 10001000 steps",
    "Maximum steps 10,00010,000",
}
"""Lines of the paper's text, which has every number twice."""
BUDGETS = {"100", "15.625", "7.8125", "23.438", "21.875", "11.719", "10.938"}


def rows():
    """The rows of Tables 1 to 4."""
    with (RECIPES / "paper_rows.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def holds(found, wanted):
    """The keys of ``wanted`` that ``found`` has otherwise."""
    return {key: found.get(key) for key, value in wanted.items() if found.get(key) != value}


def test_the_tables_print_these_settings(shared):
    lines = {line.strip() for line in (shared / "papers" / "subtoken_routing.txt").read_text().splitlines()}
    assert lines >= PRINTED


@pytest.mark.slow
def test_every_recipe_of_the_paper_has_the_settings_of_its_table():
    """LoRA, optimiser, steps, lengths, routing and reducer, of all rows, stage 1s, Figure 1 and section 3.5."""
    paper = [*paper_arms.arms(), *paper_arms.reported_arms()]
    for arm in paper:
        content = yaml.safe_load(recipe_text(recipe(arm.name)))
        model, data, table = content["model"], content["data"], TABLE_5 if arm.backbone.is_text else TABLE_7
        staged = "stage2" in model
        assert staged == arm.name.endswith("_stage2")
        wrong = {} if staged else holds(model["lora"], table["lora"])
        wrong |= holds(model["optimizer"], table["optimizer"]) | holds(data, table["data"])
        wrong |= holds(content["trainer"], {"max_steps": table["max_steps"]})
        if model["reducer"]["name"] == "quest":
            wrong |= holds(model["reducer"], table["quest"])
        if arm.routed:
            routing = {"num_groups": arm.num_groups, "kept_groups": arm.kept_groups, "balance_weight": 0.01}
            asking = arm.backbone.is_text or arm.variant == "_query"
            routing |= {"query_conditioned": True} if asking else {}
            routing |= {"budget": "global"} if arm.backbone.is_text else {}
            wrong |= holds(model["routing"], routing)
            assert ("query_conditioned" in model["routing"]) == asking
        assert wrong == {}, arm.name
    assert len(paper) == 118 + 5


def test_every_row_has_its_percentage_from_the_ledger():
    """r (1 + K/S) / 2, printed to three decimals; the anchor's tokens hold those bytes and less than a token more."""
    arms = {(arm.model, arm.reducer, arm.keep, arm.num_groups, arm.kept_groups): arm for arm in paper_arms.arms()}
    names = {backbone.words: name for name, backbone in paper_arms.BACKBONES.items()}
    assert {row["total_kv"] for row in rows()} == BUDGETS
    for row in rows():
        if row["variant"] in ("lora_only", "full", "token_only"):
            continue
        groups = int(row["num_groups"]), int(row["kept_groups"])
        budget = KVBudget(float(row["token_keep"]) / 100, *groups)
        assert abs(100 * budget.exact_total - Fraction(row["total_kv"])) <= Fraction(1, 2000), row
        arm = arms[names[row["model"]], row["reducer"].lower(), row["token_keep"], *groups]
        shape, tokens = geometry(arm.backbone.shape), arm.backbone.tokens
        ledger = nominal_ledger(shape, {"visual": tokens}, budget, kept_tokens=arm.kept_tokens())
        assert ledger.fraction() == pytest.approx(float(budget.exact_total), abs=1e-12)
    for arm in paper_arms.arms():
        if arm.anchor:
            over = Fraction(arm.kept_tokens(), arm.backbone.tokens) - arm.budget.exact_total
            assert 0 <= over < Fraction(1, arm.backbone.tokens), arm.name
