"""Quest's counts of pages, and every budget that cannot be met."""

from __future__ import annotations

import pytest

from subtoken_train.ledger.kv_budget import KVBudget
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region
from tests.support.context_views import context_view


def quest(keep_ratio=0.25, **settings):
    return build_reducer(name="quest", keep_ratio=keep_ratio, **settings)


@pytest.mark.parametrize(
    ("keep_ratio", "tokens", "kept"),
    [(0.25, 2048, 512), (0.125, 2048, 256), (0.234375, 2048, 480), (0.21875, 2048, 448), (0.1171875, 2048, 240)],
)
def test_paper_budgets_are_whole_pages(keep_ratio, tokens, kept):
    assert quest(keep_ratio).kept_tokens(tokens) == kept
    assert quest(keep_ratio, round_up=True).kept_tokens(tokens) == kept


def test_embedded_budgets_are_whole_pages():
    """The embedded language model: 512 tokens in pages of 4, window 16; the anchors of S8K7, S8K6 at both ratios."""
    pages = {0.25: 32, 0.125: 16}
    for ratio, kept in pages.items():
        assert quest(ratio, page_size=4, window=16).kept_pages(512) == kept
        for groups, anchor in ((7, {0.25: 30, 0.125: 15}), (6, {0.25: 28, 0.125: 14})):
            fraction = KVBudget(ratio, 8, groups).total_kv_fraction
            assert quest(fraction, page_size=4, window=16, round_up=True).kept_pages(512) == anchor[ratio]


def test_ours_rounds_down_and_the_anchor_up():
    assert quest(0.3, page_size=4, window=4).kept_pages(100) == 7
    assert quest(0.3, page_size=4, window=4, round_up=True).kept_pages(100) == 8
    assert quest(1.0, page_size=4, window=4).kept_tokens(101) == 101


@pytest.mark.parametrize(
    ("settings", "tokens", "message"),
    [
        ({}, 40, r"the context has 40 tokens, fewer than a page .16. or the window .64."),
        ({"window": 0}, 12, r"the context has 12 tokens, fewer than a page"),
        ({"window": 0}, 48, r"leaves 12 of 48 context tokens, and pages of 16 .* need 1 page"),
        ({"window": 64}, 128, r"leaves 32 of 128 context tokens, and pages of 16 .* need 4 page"),
    ],
)
def test_budgets_that_no_page_can_meet(settings, tokens, message):
    with pytest.raises(ValueError, match=message):
        quest(**settings).kept_pages(tokens)


@pytest.mark.parametrize("settings", [{"page_size": 0}, {"window": -1}])
def test_bad_settings(settings):
    with pytest.raises(ValueError, match=r"reducer (page_size|window) is -?[01]; it must be"):
        quest(**settings)


def test_a_query_region_of_zero_tokens():
    view = context_view([[Region.CONTEXT] * 8])
    with pytest.raises(ValueError, match="a query region of zero tokens"):
        quest(0.5, page_size=2, window=2).keep_context(view)


def test_a_sample_without_context_keeps_none_and_needs_no_query():
    view = context_view([[Region.CONTEXT] * 8 + [Region.QUERY], [Region.SYSTEM] * 9])
    kept = quest(0.5, page_size=2, window=2).keep_context(view)
    assert kept.sum(-1).tolist() == [4, 0]
    assert kept[0, 6:8].all()
