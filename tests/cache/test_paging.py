"""Pages: which entries make one, which a query chooses beside loops and two releases, what is gathered of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.cache.by_sample import select_samples
from subtoken_train.cache.pack import PageReading, with_pages
from subtoken_train.kernels.cpu import packed_attention
from subtoken_train.kernels.storage import Block, BlockPart, PageIndex, Tail, chosen_pages, page_bound, read_pages
from tests.support.golden_cases import alike, load, near, record
from tests.support.helpers import random_mask, random_scores
from tests.support.packing import FORMAT_OF


def block_of(rows, length, heads=2, numbers=None, seed=0, bits=0):
    keys, values = random_scores(seed, rows, heads, length, 4), random_scores(seed + 1, rows, heads, length, 4)
    return Block(numbers, [BlockPart(FORMAT_OF[bits].store(keys), FORMAT_OF[bits].store(values))])


def only(states):
    return Tail(states, states, states.shape[2])


def marks(*spans, length):
    places = torch.arange(length)
    return torch.stack([(places >= start) & (places < stop) for start, stop in spans])


@pytest.mark.parametrize(
    ("length", "span", "budget", "least", "count", "forced"),
    [
        # 0-3 hold an entry out of scope; 20 and 21 are a page that is begun
        (22, (2, 22), 12, 1, 3, [0]),  # 2 + 2 are always read, 8 more are two pages
        (22, (2, 22), 20, 1, 5, None),  # all of them: read in full
        (22, (2, 22), 1, 1, 1, [0]),
        (22, (2, 22), 1, 4, 3, [0]),  # three whole ones and the begun one
        (20, (0, 20), 8, 1, 2, [4]),  # the last page is always read and counts
        (20, (0, 20), 7, 1, 1, [4]),
        (20, (0, 17), 9, 1, 3, [4]),  # one of the last page's competes
        (20, (0, 0), 0, 1, 5, None),  # nothing is chosen among
        (3, (0, 3), 1, 1, 0, None),  # no whole page
    ],
)
def test_pages_of_a_row(length, span, budget, least, count, forced):
    reading = PageReading(4, least, marks(span, length=length), torch.tensor([budget]))
    ((block,),) = with_pages([(block_of(1, length), reading)])
    if forced is None:
        assert block.pages is None
        assert block.unread_bytes == 0
        return
    assert block.pages.count == count
    assert block.pages.forced[0].nonzero()[:, 0].tolist() == forced
    keys = block.parts[0].keys.data[:, :, : 4 * (length // 4)].unflatten(2, (-1, 4))
    assert torch.equal(block.pages.low, keys.amin(3))
    assert torch.equal(block.pages.high, keys.amax(3))
    unread = length // 4 - count
    assert block.unread_bytes == unread * 4 * 2 * 2 * 4 * 4  # entries, heads, key and value, channels, bytes
    assert block.index_bytes == 2 * 2 * (length // 4) * 4 * 4 + length // 4


def test_rows_that_read_unlike_numbers_lie_apart():
    reading = PageReading(4, 1, marks((0, 16), (0, 12), (0, 16), length=16), torch.tensor([8, 8, 4]))
    whole = block_of(3, 16)
    (blocks,) = with_pages([(whole, reading)])
    assert whole.pages is None
    assert [(block.rows.tolist(), block.pages.count) for block in blocks] == [([2], 1), ([0], 2), ([1], 3)]
    for block in blocks:
        for row, number in enumerate(block.rows.tolist()):
            assert torch.equal(block.parts[0].keys.data[row], whole.parts[0].keys.data[number])


def test_a_choice_of_samples_takes_their_pages_along():
    reading = PageReading(4, 1, marks((0, 16), (0, 12), (0, 16), length=16), torch.tensor([8, 8, 8]))
    (blocks,) = with_pages([(block_of(3, 16), reading)])
    query, tail = random_scores(3, 3, 4, 1, 4), random_scores(4, 3, 2, 1, 4)
    before = packed_attention(query[[2, 1, 1]], select_samples(blocks, [2, 1, 1], kv_heads=2), only(tail), 0.5)
    for i, sample in enumerate([2, 1, 1]):
        alone = select_samples(blocks, [sample], kv_heads=2)
        assert torch.allclose(before[[i]], packed_attention(query[[sample]], alone, only(tail[[i]]), 0.5), atol=1e-6)


def test_several_tokens_at_a_time_read_everything():
    block = block_of(1, 16)
    ((paged,),) = with_pages([(block, PageReading(4, 1, marks((0, 16), length=16), torch.tensor([4])))])
    query, tail = random_scores(3, 1, 2, 3, 4), random_scores(4, 1, 2, 3, 4)
    plain = Block(None, block.parts)
    for new in (3, 1):
        read, whole = (packed_attention(query[:, :, :new], [it], only(tail[:, :, :new]), 0.5) for it in (paged, plain))
        assert torch.equal(read, whole) == (new > 1)


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
    pages = index_of(keys, size, count, forced)
    products = [query[:, :, :, None] * bound[:, :, None] for bound in (pages.low, pages.high)]
    bounds = torch.maximum(*products).sum(-1).mean(2).masked_fill(forced[:, None], torch.inf)
    for own, kept in zip(bounds.flatten(0, 1).tolist(), chosen_pages(pages, query).flatten(0, 1).tolist(), strict=True):
        assert len(set(kept)) == count
        worst = min((own[page] for page in kept), default=float("inf"))
        assert all(own[page] <= worst + 1e-4 for page in range(number) if page not in kept)


def test_ties_go_to_the_earlier_page():
    assert chosen_pages(index_of(torch.ones(1, 1, 8, 4), 2, 2), torch.ones(1, 1, 1, 4)).tolist() == [[[0, 1]]]


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
        dense, places = stored.read(), (4 * which[..., None] + torch.arange(4)).flatten(2)
        assert torch.equal(taken.read(), dense.gather(2, places[..., None].expand(-1, -1, -1, 4)))
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
    near("quest_steps", "quest_official: bounds", bound, tensors["page_scores"][:, :, 0], atol=1e-4)
    count = min(max(3, params["token_budget"] // size), number)
    chosen = chosen_pages(PageIndex(size, count, low, high, torch.zeros(len(keys), number, dtype=torch.bool)), query)
    places = torch.zeros(*keys.shape[:2], number, dtype=torch.bool).scatter(2, chosen, True)
    kept = places.repeat_interleave(size, 2)[..., :length]
    alike("quest_steps", "quest_official", kept, tensors["kept_mask"][:, :, 0])


def test_golden_of_kvcache_factory(shared):
    params, tensors = load(shared, "quest_factory_pages")
    keys, query = tensors["keys_repeated"], tensors["queries"][:, :, -1:]
    size, length = params["page_size"], keys.shape[2]
    whole = index_of(keys, size, 0)
    if not length % size:  # it repeats the last key in a page that is begun
        assert torch.equal(whole.low, tensors["page_min"])
        assert torch.equal(whole.high, tensors["page_max"])
    found = chosen_pages(index_of(keys[:, :, : length - params["recent_size"]], size, params["page_budget"]), query)
    differing = int((found.sort(-1).values != tensors["selected_pages"].sort(-1).values).sum())
    record("quest_steps", "quest_factory_pages: pages that differ", differing)
    assert differing == 0
