"""benchmarks/text_routed.py and text_backbone.py: records are whole and make the page's table; texts do not overlap."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.text_backbone import BLOCK, PARTS, START, blocks_of, part_of
from benchmarks.text_routed import (
    CONTEXT,
    FINE,
    SCORERS,
    SEEDS,
    WINDOWS,
    arms,
    bits_a_byte,
    read_runs,
    recipe_of,
    table,
)
from subtoken_train.resources import shipped_recipe
from tests.support import places


def test_records_are_whole_and_make_the_table():
    runs = read_runs()
    assert list(runs) == list(arms())
    found = [run for own in runs.values() for run in own]
    for same in ("windows_sha256", "backbone_sha256"):
        assert len({run[same] for run in found}) == 1
    for name, own in runs.items():
        plan = arms()[name]
        assert [(run["arm"], run["recipe"], run["seed"]) for run in own] == [(name, plan.recipe, s) for s in SEEDS]
        assert all(run["settings"] == plan.settings for run in own)
        assert all(len(run["nats"]) == len(run["text_bytes"]) == WINDOWS for run in own)
    assert table(runs) in (places.ROOT / "docs/quality/recall.md").read_text()


def test_routed_arms_hold_what_the_anchor_holds():
    for scorer in SCORERS:
        share = {role: read_runs()[f"{scorer}_{role}"][0]["kv"] for role in ("anchor", "value_norm", "router", "fine")}
        whole = share.pop("anchor")
        assert max(share.values()) <= whole * 1.0025  # a share of a window's tokens is a whole number of them
        assert min(share.values()) >= whole * 0.96  # Quest's anchor was rounded up to whole pages then


def test_every_arm_is_a_shipped_recipe():
    assert all(shipped_recipe(plan.recipe) is not None for plan in arms().values())


def test_a_recipe_holds_the_arms_settings_and_text(tmp_path: Path):
    recipe = recipe_of(arms()["quest_fine"], 2, tmp_path)
    routing = {f"model.routing.{name}": value for name, value in recipe["model"]["routing"].items()}
    assert routing.items() >= FINE.items()
    assert (recipe["seed_everything"], recipe["data"]["seed"], recipe["data"]["context_length"]) == (2, 2, CONTEXT)
    assert "num_facts" not in recipe["data"]
    assert recipe["model"]["reducer"]["name"] == "quest"


def test_parts_share_no_text_and_leave_none_out(tmp_path: Path):
    text = "".join(f"w{i} " for i in range(1000))
    (tmp_path / "valid.txt").write_text(text)
    assert "".join(part_of(tmp_path, part) for part in PARTS) == text


def test_blocks_begin_with_a_bos_and_are_the_text_in_order():
    tokenizer = AutoTokenizer.from_pretrained(START)
    text = "Function definitions bind names to objects. " * 400
    blocks = blocks_of(tokenizer, text)
    assert blocks.shape[1] == BLOCK > CONTEXT
    assert (blocks[:, 0] == tokenizer.bos_token_id).all()
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    read = blocks[:, 1:].flatten()
    assert torch.equal(read, ids[: len(read)])
    assert len(ids) - len(read) < BLOCK - 1


def test_bits_are_of_the_scored_texts_bytes():
    runs = [{"nats": [-2.0 * math.log(2), -3.0 * math.log(2)], "text_bytes": [1, 6]}]
    assert np.allclose(bits_a_byte(runs), [[2.0, 0.5]])
