"""Regions that keep nothing in some layer are found, counted and worded."""

from __future__ import annotations

import torch

from subtoken_train.inference.cache_report import held_rows
from subtoken_train.ledger.measure import emptied_regions, emptied_words
from subtoken_train.types import LayerPlan, Plan

REGIONS = torch.tensor([[1, 2, 2, 4], [0, 1, 2, 4], [0, 0, 1, 4]])

HELD = [REGIONS != 0] * 2


def test_found_per_sample_and_layer():
    whole = LayerPlan(torch.tensor([[0, 1, 2, 3], [1, 2, 3, -1], [2, 3, -1, -1]]))
    blind = LayerPlan(torch.tensor([[0, 3, -1], [1, 2, 3], [3, -1, -1]]))
    assert emptied_regions(Plan([whole, whole]), REGIONS, HELD) == [{}, {}, {}]
    assert emptied_regions(Plan([whole, blind]), REGIONS, HELD) == [{"visual": 1}, {}, {"system": 1}]
    assert emptied_regions(Plan([blind, blind]), REGIONS, HELD) == [{"visual": 2}, {}, {"system": 2}]


def test_what_a_window_left_behind_was_not_taken_by_compression():
    """A window of 3 holds the last two rows: no system row of the first two samples, and one visual row each."""
    held = held_rows([None, 3], REGIONS)
    assert torch.equal(held[0], HELD[0])
    assert held[1].tolist() == [[False, False, True, True]] * 3
    last = LayerPlan(torch.tensor([[2, 3]] * 3))
    assert emptied_regions(Plan([last]), REGIONS, held[1:]) == [{}, {}, {}]
    assert emptied_regions(Plan([last]), REGIONS, held[:1]) == [{"system": 1}, {"system": 1}, {}]
    text = LayerPlan(torch.tensor([[3]] * 3))
    assert emptied_regions(Plan([text]), REGIONS, held[1:]) == [{"visual": 1}, {"visual": 1}, {"system": 1}]


def test_an_entry_of_one_head_is_something():
    heads = torch.tensor([[[1, 1], [1, 0], [1, 1]]]).bool()
    assert emptied_regions(
        Plan([LayerPlan(torch.tensor([[0, 1, 3]]), heads_BNh=heads)]), REGIONS[:1], [HELD[0][:1]]
    ) == [{}]


def test_words_name_regions_and_prompts():
    assert emptied_words([{}, {}], "snapkv 0.1") is None
    words = emptied_words([{"visual": 3}, {"visual": 1, "system": 2}, {}], "snapkv 0.1 all")
    assert words.startswith("snapkv 0.1 all: nothing is left of a whole region in some layer: visual (2 of 3 prompts),")
    assert "system (1 of 3 prompts)" in words
    assert len(words) < 400
