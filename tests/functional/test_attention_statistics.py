"""Attention statistics: equal to a dense masked softmax, whatever the blocks, padding and dtype; no N x N tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.functional.attention_statistics import BLOCK, attention_blocks, attention_rows
from tests.support.host_reads import LargestTensor


def dense(query, key, keys, scale):
    """[B, H, N, N]: causal softmax over the marked keys in float64; rows that see none are 0."""
    length = query.shape[2]
    repeated = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    seen = torch.ones(length, length, dtype=torch.bool).tril() & keys[:, None]
    weight = ((query.double() @ repeated.mT) * scale).exp() * seen[:, None]
    return weight / weight.sum(-1, keepdim=True).clamp(min=1e-300)


def tensors(batch, heads, kv_heads, length, width=4, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, count, length, width, generator=generator).to(dtype) for count in (heads, kv_heads)]


def collect(blocks, like):
    """Put the rows of blocks back to their places, and where they were written, [B, H, N, N] and [B, N] counts."""
    matrix, times = torch.zeros_like(like), torch.zeros(like.shape[0], like.shape[2], dtype=torch.long)
    for index, probability in blocks:
        for sample, rows in enumerate(index.tolist()):
            for slot, row in enumerate(rows):
                if row < 0:
                    assert not probability[sample, :, slot].any()
                else:
                    matrix[sample, :, row] = probability[sample, :, slot]
                    times[sample, row] += 1
    return matrix, times


@st.composite
def problems(draw):
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    length = draw(st.integers(1, 14))
    query, key = tensors(batch, kv_heads * group, kv_heads, length, seed=draw(st.integers(0, 99)))
    marks = st.lists(st.booleans(), min_size=batch * length, max_size=batch * length)
    keys, rows = (torch.tensor(draw(marks)).view(batch, length) for _ in range(2))
    return query, key, rows, keys


@given(problems(), st.integers(1, 16), st.data())
def test_blocks_are_the_dense_rows(problem, block, data):
    """Any rows, any keys (empty sets too), any block size; every marked row once; queries may be of the last rows."""
    query, key, rows, keys = problem
    offset = data.draw(st.integers(0, query.shape[2] - 1))
    query, rows = query[:, :, offset:], rows[:, offset:]
    expected = dense(problem[0], key, keys, 0.7)[:, :, offset:] * rows[:, None, :, None]
    blocks = list(attention_blocks(query, key, rows, keys, 0.7, block, offset=offset))
    assert sum(index.shape[1] for index, _ in blocks) == rows.sum(-1).max()  # no row is computed for nothing
    matrix, times = collect(blocks, expected)
    assert torch.equal(times, rows.long())
    assert torch.allclose(matrix, expected, atol=1e-6)


@given(problems(), st.data())
def test_chosen_rows_are_the_dense_rows(problem, data):
    """In any order, several times, or none (-1)."""
    query, key, _, keys = problem
    batch, heads, length, _ = query.shape
    width = data.draw(st.integers(0, 5))
    picks = st.lists(st.integers(-1, length - 1), min_size=batch * width, max_size=batch * width)
    index = torch.tensor(data.draw(picks), dtype=torch.long).view(batch, width)
    rows = attention_rows(query, key, index, keys, 0.7)
    assert rows.dtype == torch.float32
    assert rows.shape == (batch, heads, width, length)
    expected = dense(query, key, keys, 0.7)
    for sample, row in enumerate(index.tolist()):
        for slot, place in enumerate(row):
            wanted = expected[sample, :, place] if place >= 0 else torch.zeros(heads, length).double()
            assert torch.allclose(rows[sample, :, slot].double(), wanted, atol=1e-6)


def test_bf16_inputs_are_computed_in_fp32_and_large_scores_do_not_overflow():
    (query, key), everything = tensors(2, 4, 2, 20, dtype=torch.bfloat16), torch.ones(2, 20, dtype=torch.bool)
    places = torch.arange(20).expand(2, -1)
    rows = attention_rows(query, key, places, everything, 0.5)
    assert torch.allclose(rows.double(), dense(query, key, everything, 0.5), atol=1e-6)
    rows = attention_rows(query.float() * 1e3, key.float() * 1e3, places, everything, 1.0)
    assert torch.allclose(rows.sum(-1), torch.ones(2, 4, 20))


@pytest.mark.parametrize(("block", "length"), [(8, 300), (BLOCK, 1500)])
def test_memory_is_a_block_of_rows(block, length):
    """The largest tensor holds heads x block x N elements: less than one N x N matrix."""
    query, key = tensors(1, 4, 2, length, width=2)
    everything = torch.ones(1, length, dtype=torch.bool)
    with LargestTensor() as largest:
        rows = sum(index.shape[1] for index, _ in attention_blocks(query, key, everything, everything, 1.0, block))
    assert rows == length
    assert largest.elements == 4 * block * length < length * length
