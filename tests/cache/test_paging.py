"""Page indices of packed blocks: how many pages are read, which always are, rows that read unlike numbers, bytes."""

import pytest
import torch

from subtoken_train.cache.by_sample import select_samples
from subtoken_train.cache.pack import PageReading, with_pages
from subtoken_train.kernels.cpu import packed_attention
from subtoken_train.kernels.storage import Block, BlockPart, Tail
from tests.support.helpers import random_scores
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
    (block,) = with_pages([block_of(1, length)], reading)
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
    blocks = with_pages([whole], reading)
    assert whole.pages is None
    assert [(block.rows.tolist(), block.pages.count) for block in blocks] == [([2], 1), ([0], 2), ([1], 3)]
    for block in blocks:
        for row, number in enumerate(block.rows.tolist()):
            assert torch.equal(block.parts[0].keys.data[row], whole.parts[0].keys.data[number])


def test_a_choice_of_samples_takes_their_pages_along():
    reading = PageReading(4, 1, marks((0, 16), (0, 12), (0, 16), length=16), torch.tensor([8, 8, 8]))
    blocks = with_pages([block_of(3, 16)], reading)
    chosen = select_samples(blocks, [2, 1, 1], kv_heads=2)
    query, tail = random_scores(3, 3, 4, 1, 4), random_scores(4, 3, 2, 1, 4)
    before = packed_attention(query[[2, 1, 1]], chosen, only(tail), 0.5)
    for i, sample in enumerate([2, 1, 1]):
        alone = select_samples(blocks, [sample], kv_heads=2)
        found = packed_attention(query[[sample]], alone, only(tail[[i]]), 0.5)
        assert torch.allclose(before[[i]], found, atol=1e-6)


def test_several_tokens_at_a_time_read_everything():
    block = block_of(1, 16)
    (paged,) = with_pages([block], PageReading(4, 1, marks((0, 16), length=16), torch.tensor([4])))
    query, tail = random_scores(3, 1, 2, 3, 4), random_scores(4, 1, 2, 3, 4)
    plain = Block(None, block.parts)
    for new in (3, 1):
        read, whole = (
            packed_attention(query[:, :, :new], [own], only(tail[:, :, :new]), 0.5) for own in (paged, plain)
        )
        assert torch.equal(read, whole) == (new > 1)
