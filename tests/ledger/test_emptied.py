"""Regions that keep nothing in some layer are found, counted and worded."""

from __future__ import annotations

import torch

from subtoken_train.ledger.measure import emptied_regions, emptied_words
from subtoken_train.types import LayerPlan, Plan

REGIONS = torch.tensor([[1, 2, 2, 4], [0, 1, 2, 4], [0, 0, 1, 4]])


def test_found_per_sample_and_layer():
    whole = LayerPlan(torch.tensor([[0, 1, 2, 3], [1, 2, 3, -1], [2, 3, -1, -1]]))
    blind = LayerPlan(torch.tensor([[0, 3, -1], [1, 2, 3], [3, -1, -1]]))
    assert emptied_regions(Plan([whole, whole]), REGIONS) == [{}, {}, {}]
    assert emptied_regions(Plan([whole, blind]), REGIONS) == [{"visual": 1}, {}, {"system": 1}]
    assert emptied_regions(Plan([blind, blind]), REGIONS) == [{"visual": 2}, {}, {"system": 2}]


def test_an_entry_of_one_head_is_something():
    heads = torch.tensor([[[1, 1], [1, 0], [1, 1]]]).bool()
    assert emptied_regions(Plan([LayerPlan(torch.tensor([[0, 1, 3]]), heads_BNh=heads)]), REGIONS[:1]) == [{}]


def test_words_name_regions_and_prompts():
    assert emptied_words([{}, {}], "snapkv 0.1") is None
    words = emptied_words([{"visual": 3}, {"visual": 1, "system": 2}, {}], "snapkv 0.1 all")
    assert words.startswith("snapkv 0.1 all: nothing is left of a whole region in some layer: visual (2 of 3 prompts),")
    assert "system (1 of 3 prompts)" in words
    assert len(words) < 400
