"""Page scores and the choice of pages against plain loops and two released implementations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.reducers.contexts import keep_by_page, page_bounds, page_index, page_scores
from tests.support.golden_cases import alike, load, near
from tests.support.helpers import random_mask, random_scores

sizes = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), st.integers(1, 14), st.integers(1, 5))


def scores_by_loop(query, key, context, asks, page_size):
    """One head, page, query row and channel at a time."""
    per_group = query.shape[0] // key.shape[0]
    tokens = context.nonzero()[:, 0].tolist()
    pages = [tokens[start : start + page_size] for start in range(0, len(tokens), page_size)]
    rows = asks.nonzero()[:, 0].tolist()
    scores = []
    for page in pages:
        total = 0.0
        for head in range(query.shape[0]):
            block = key[head // per_group, page].float()
            for row in rows:
                low, high = query[head, row].float() * block.amin(0), query[head, row].float() * block.amax(0)
                total += float(torch.maximum(low, high).sum())
        scores.append(total / max(1, len(rows)) / query.shape[0])
    return scores


@pytest.mark.slow
@given(sizes, st.integers(1, 6), st.integers(0, 100), st.sampled_from([torch.float32, torch.bfloat16]))
def test_scores_equal_a_plain_loop(size, page_size, seed, dtype):
    batch, kv_heads, group, length, width = size
    query = random_scores(seed, batch, kv_heads * group, length, width, dtype=dtype)
    key = random_scores(seed + 1, batch, kv_heads, length, width, dtype=dtype)
    context, asks = random_mask(seed + 2, batch, length), random_mask(seed + 3, batch, length, share=0.4)
    low, high = page_bounds(key, page_index(context, page_size), -(-length // page_size))
    scores = page_scores(query, asks, low, high)
    for sample in range(batch):
        expected = scores_by_loop(query[sample], key[sample], context[sample], asks[sample], page_size)
        if asks[sample].any():
            torch.testing.assert_close(scores[sample, : len(expected)], torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_golden_of_quest(shared):
    params, golden = load(shared, "quest_official")
    check_heads(
        "quest_official", golden["query"], golden["keys"], golden["page_scores"][:, :, -1], params["chunk_size"]
    )


def test_golden_of_kvcache_factory(shared):
    params, golden = load(shared, "quest_factory_pages")
    keys, size = golden["keys_repeated"], params["page_size"]
    batch, heads, length, _ = keys.shape
    low, high = page_bounds(keys, page_index(torch.ones(batch, length, dtype=torch.bool), size), -(-length // size))
    alike("quest", "quest_factory_pages: smallest of a page", low, golden["page_min"])
    alike("quest", "quest_factory_pages: largest of a page", high, golden["page_max"])
    check_heads("quest_factory_pages", golden["queries"][:, :, -1:], keys, golden["page_scores"], size)
    choice = length - params["recent_size"]  # its window is outside the choice
    context = (torch.arange(length) < choice).expand(batch, -1)
    page, none = page_index(context, size), torch.zeros(batch, dtype=torch.long)
    for head in range(heads):
        kept = keep_by_page(golden["page_scores"][:, head], context, size, none + size * params["page_budget"], none)
        chosen = torch.stack([row[marks].unique() for row, marks in zip(page, kept, strict=True)])
        alike("quest", "quest_factory_pages", chosen, golden["selected_pages"][:, head].sort(-1).values)


def check_heads(case, query, keys, expected_BHP, page_size):
    """The released codes score every head for itself; a one-head call does the same."""
    batch, _, length, _ = keys.shape
    page = page_index(torch.ones(batch, length, dtype=torch.bool), page_size)
    asks = torch.ones(batch, query.shape[2], dtype=torch.bool)
    for head in range(query.shape[1]):
        low, high = page_bounds(keys[:, head : head + 1], page, expected_BHP.shape[-1])
        scores = page_scores(query[:, head : head + 1], asks, low, high)
        near("quest", f"{case}: scores", scores, expected_BHP[:, head], rtol=1e-5, atol=1e-5)


def test_autocast_does_not_coarsen_the_choice():
    """In bf16 many pages would tie, and training would keep other pages than inference."""
    query, key = random_scores(0, 1, 8, 4, 32), random_scores(1, 1, 8, 256, 32)
    page = page_index(torch.ones(1, 256, dtype=torch.bool), 4)
    asks = torch.ones(1, 4, dtype=torch.bool)
    expected = page_scores(query, asks, *page_bounds(key, page, 64))
    with torch.autocast("cpu", torch.bfloat16):
        scores = page_scores(query, asks, *page_bounds(key, page, 64))
    assert scores.dtype == torch.float32
    assert torch.equal(scores, expected)
