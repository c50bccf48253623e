"""Pages that a query chooses, against plain loops and the goldens of two releases; what is gathered of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.kernels.storage import Block, BlockPart, PageIndex, chosen_pages, page_bound, read_pages
from tests.support.golden_cases import load, record
from tests.support.helpers import random_mask, random_scores
from tests.support.packing import FORMAT_OF


def index_of(keys, size, count, forced=None):
    """The index of whole pages of [R, c, M, d] keys."""
    number = keys.shape[2] // size
    parts = keys[:, :, : number * size].unflatten(2, (number, size))
    forced = torch.zeros(len(keys), number, dtype=torch.bool) if forced is None else forced
    return PageIndex(size, count, parts.amin(3), parts.amax(3), forced)


@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(4, 30), st.integers(1, 4), st.integers(0, 50)
)
def test_choice_equals_a_plain_loop(rows, heads, group, length, size, seed):
    keys, query = random_scores(seed, rows, heads, length, 5), random_scores(seed + 1, rows, heads, group, 5)
    number = length // size
    forced = random_mask(seed + 2, rows, number, share=0.2)
    count = max(int(forced.sum(-1).max()), number // 2)
    found = chosen_pages(index_of(keys, size, count, forced), query)
    for r in range(rows):
        for h in range(heads):
            bounds = []
            for page in range(number):
                own = keys[r, h, page * size : (page + 1) * size]
                each = [float(torch.maximum(q * own.amin(0), q * own.amax(0)).sum()) for q in query[r, h]]
                bounds.append(float("inf") if forced[r, page] else sum(each) / group)
            kept = found[r, h].tolist()
            assert len(set(kept)) == count
            worst = min((bounds[page] for page in kept), default=float("inf"))
            assert all(bounds[page] <= worst + 1e-4 for page in range(number) if page not in kept)


def test_ties_go_to_the_earlier_page():
    keys = torch.ones(1, 1, 8, 4)
    assert chosen_pages(index_of(keys, 2, 2), torch.ones(1, 1, 1, 4)).tolist() == [[[0, 1]]]


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("length", [12, 14])
def test_entries_of_the_chosen_pages_and_what_is_left_over(bits, length):
    keys, values = random_scores(0, 2, 3, length, 4), random_scores(1, 2, 3, length, 4)
    part = BlockPart(FORMAT_OF[bits].store(keys), FORMAT_OF[bits].store(values))
    pages = index_of(keys, 4, 2)
    query = random_scores(2, 2, 3, 2, 4)
    chosen, left_over = read_pages(Block(None, [part], pages=pages), query).parts
    which = chosen_pages(pages, query)
    for stored, taken, rest in zip(part.payloads, chosen.payloads, left_over.payloads, strict=True):
        dense = stored.read()
        for r in range(2):
            for h in range(3):
                places = [4 * page + i for page in which[r, h].tolist() for i in range(4)]
                assert torch.equal(taken.read()[r, h], dense[r, h, places])
        assert torch.equal(rest.read(), dense[:, :, 12:])


def test_golden_of_quest(shared):
    """Bounds of every page, and what each query head keeps; a page may be begun, which there competes as well."""
    params, tensors = load(shared, "quest_official")
    query, keys = tensors["query"], tensors["keys"].repeat_interleave(params["H"] // params["Hkv"], 1)
    if keys.shape[1] != query.shape[1]:
        keys = tensors["keys"]
    size, length = params["chunk_size"], keys.shape[2]
    number = -(-length // size)
    parts = [keys[:, :, i * size : (i + 1) * size] for i in range(number)]
    low, high = (torch.stack([getattr(part, name)(2) for part in parts], 2) for name in ("amin", "amax"))
    bound = page_bound(query[:, :, 0].clamp(min=0), query[:, :, 0].clamp(max=0), low, high)
    record("quest_steps", "quest_official: bounds", float((bound - tensors["page_scores"][:, :, 0]).abs().max()))
    assert torch.allclose(bound, tensors["page_scores"][:, :, 0], rtol=1e-4, atol=1e-4)
    count = min(max(3, params["token_budget"] // size), number)
    none = torch.zeros(len(keys), number, dtype=torch.bool)
    chosen = chosen_pages(PageIndex(size, count, low, high, none), query)
    places = torch.zeros(*keys.shape[:2], number, dtype=torch.bool).scatter(2, chosen, True)
    kept = places.repeat_interleave(size, 2)[..., :length]
    differing = int((kept != tensors["kept_mask"][:, :, 0]).sum())
    record("quest_steps", "quest_official: places that differ", differing)
    assert differing == 0


def test_golden_of_kvcache_factory(shared):
    params, tensors = load(shared, "quest_factory_pages")
    keys, query = tensors["keys_repeated"], tensors["queries"][:, :, -1:]
    size, length = params["page_size"], keys.shape[2]
    whole = index_of(keys, size, 0)
    if not length % size:  # it repeats the last key in a page that is begun
        assert torch.equal(whole.low, tensors["page_min"])
        assert torch.equal(whole.high, tensors["page_max"])
    before = keys[:, :, : length - params["recent_size"]]
    found = chosen_pages(index_of(before, size, params["page_budget"]), query)
    differing = int((found.sort(-1).values != tensors["selected_pages"].sort(-1).values).sum())
    record("quest_steps", "quest_factory_pages: pages that differ", differing)
    assert differing == 0
