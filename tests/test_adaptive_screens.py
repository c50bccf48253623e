"""Budgets per layer and ranks by sharpness: what the two screens compute, and that the page shows their records."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks import layer_budgets, sharpness
from benchmarks.comparison_lists import read_comparison
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress, make_batch
from tests.support.places import ROOT

PAGE = ROOT / "docs/trials.md"


def shown(screen):
    return PAGE.read_text(encoding="utf-8").split(screen.START + "\n")[1].split("\n" + screen.END)[0]


@torch.no_grad()
def test_every_layer_keeps_its_own_number_of_groups(tiny_family):
    backbone = compress(tiny_family, RoutingConfig("value_norm", 16, 4))
    kept = [2 + layer % 5 for layer in range(tiny_family.shape.num_layers)]
    batch = make_batch([(1, 9), (2, 7)])
    backbone = layer_budgets.with_budgets(backbone, kept)
    masks = backbone.run(batch).state.masks
    for layer, count in enumerate(kept):
        assert (masks[layer][batch.regions_BN == Region.VISUAL].sum(-1) == count).all()
    assert backbone.bank.config.kept_groups == 4  # what it was given stays what it was


def test_splits_hold_their_bytes_and_start_with_the_best_exchange():
    gains, losses = [-0.3, 0.0, -0.1, 0.1], [0.5, 0.1, 0.3, 0.05]
    costs = {(layer, 8): gain for layer, gain in enumerate(gains)}
    costs |= {(layer, -8): loss for layer, loss in enumerate(losses)}
    splits = layer_budgets.best_splits(costs, 16, 4)
    assert splits == [[24, 16, 16, 8], [24, 8, 24, 8]]


def test_budgets_per_layer_held_the_bytes_of_one_budget():
    record = json.loads(layer_budgets.RECORD.read_text())
    questions = read_comparison(layer_budgets.LISTS / "screens_tiny.yaml").questions
    assert set(record["arms"]) == {f"{arm}-seed{seed}" for arm, seed in layer_budgets.ARMS}
    for found in record["arms"].values():
        assert len(found["split"]) * found["kept"] == sum(found["split"])
        assert found["realised"][0] == found["realised"][1]
        assert {len(said) for said in found["score"]} == {len(found["described"])} == {questions.count // 2}


@pytest.mark.parametrize("screen", [layer_budgets, sharpness], ids=["layers", "sharpness"])
def test_the_page_shows_the_record(screen):
    assert shown(screen) == screen.table(json.loads(screen.RECORD.read_text()))


def test_a_threshold_finds_what_is_planted_and_nothing_in_noise():
    rng = np.random.default_rng(1)
    sharp, noise = rng.random(4000), rng.normal(0, 0.5, 4000)
    planted = np.where(sharp > 0.5, -1.0, 1.0) + noise
    assert 0.4 < sharpness.by_threshold(planted, sharp).mean() < 0.6
    assert abs(sharpness.by_threshold(noise, sharp).mean()) < 0.03
    assert abs(sharpness.by_threshold(noise + 1, sharp).mean()) < 0.2  # always the first: nothing is left to win


def test_sharpness_is_of_every_question_and_a_share():
    record = json.loads(sharpness.RECORD.read_text())
    count = read_comparison(sharpness.LIST).questions.count
    for layer in sharpness.LAYERS:
        shares = np.array(record["sharpness"][str(layer)])
        assert len(shares) == count
        assert ((record["kept"] / 64 < shares) & (shares <= 1)).all()  # the best are above their number's share
