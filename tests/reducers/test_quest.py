"""Quest keeps its budget to the token, at every length; which tokens, by a plain loop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.quest import page_bounds, page_index, page_scores
from subtoken_train.types import Region
from tests.support.prompt_views import context_view


def quest(keep_ratio=0.25, **settings):
    return build_reducer(name="quest", keep_ratio=keep_ratio, **settings)


def test_the_window_is_half_of_the_budget_at_most():
    assert [quest().protected_tokens(kept) for kept in (1, 2, 3, 100, 127, 128, 512)] == [0, 1, 1, 50, 63, 64, 64]
    assert quest(window=0).protected_tokens(512) == 0


def by_hand(scores, tokens, page_size, window, kept):
    """Places among a sample's context tokens: the window, then page by page, the latest of a page first."""
    free = list(range(tokens - window))
    pages = [free[start : start + page_size] for start in range(0, len(free), page_size)]
    order = sorted(range(len(pages)), key=lambda page: (-scores[page], page))
    chosen = [place for page in order for place in reversed(pages[page])]
    return set(chosen[: kept - window]) | set(range(tokens - window, tokens))


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 17), st.integers(0, 20), st.integers(1, 99),
    st.sampled_from(["left", "right"]), st.integers(0, 99),
)  # fmt: skip
def test_what_stays_by_a_plain_loop(lengths, page_size, window, percent, pad, seed):
    """Exactly the budget of every sample, whatever its length, its neighbours and its padding."""
    reducer = quest(percent / 100, page_size=page_size, window=window)
    view = context_view([[Region.SYSTEM] + [Region.CONTEXT] * n + [Region.QUERY] * 2 for n in lengths], pad, seed)
    kept = reducer.keep_context(view)
    page = page_index(view.in_scope_BN, page_size)
    scores = page_scores(view.query_BHNd, view.asks_BN, *page_bounds(view.key_BhNd, page, 40))
    for sample, tokens in enumerate(lengths):
        count = max(1, tokens * percent // 100) if tokens else 0
        expected = by_hand(scores[sample].tolist(), tokens, page_size, min(window, count // 2), count)
        rows = view.in_scope_BN[sample].nonzero()[:, 0]
        assert set(kept[sample, rows].nonzero()[:, 0].tolist()) == expected
        assert int(kept[sample].sum()) == count


def test_a_page_that_the_budget_cuts_keeps_its_latest_tokens():
    view = context_view([[Region.CONTEXT] * 12 + [Region.QUERY]])
    kept = quest(0.5, page_size=4, window=0).keep_context(view)[0, :12].view(3, 4)
    assert sorted(map(tuple, kept.tolist())) == [(False,) * 4, (False, False, True, True), (True,) * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_pages_stay_in_order(dtype):
    view = context_view([[Region.CONTEXT] * 12 + [Region.QUERY]], dtype=dtype)
    alike = view.replaced(key_BhNd=torch.ones_like(view.key_BhNd))
    assert quest(0.5, page_size=4, window=1).keep_context(alike)[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 7, 11]


def test_a_query_region_of_zero_tokens():
    view = context_view([[Region.CONTEXT] * 8])
    with pytest.raises(ValueError, match="a query region of zero tokens"):
        quest(0.5, page_size=2, window=2).keep_context(view)


def test_a_sample_without_context_keeps_none_and_needs_no_query():
    view = context_view([[Region.CONTEXT] * 8 + [Region.QUERY], [Region.SYSTEM] * 9])
    kept = quest(0.5, page_size=2, window=2).keep_context(view)
    assert kept.sum(-1).tolist() == [4, 0]
    assert kept[0, 6:8].all()
