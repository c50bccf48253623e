"""Attention of some rows and of all is plain softmax; the gradient of a choice among keys."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from subtoken_train.functional import causal_attention as attend
from subtoken_train.kernels.native import received
from tests.support.helpers import random_mask, random_scores
from tests.support.shards import LargestTensor
from tests.support.tape import unread


@pytest.mark.parametrize("block", [1, 3, 100])
@pytest.mark.parametrize("rows", [1, 5, 11])
def test_it_is_softmax_over_what_stands_before(rows, block):
    """Grouped heads, padding on either side, rows that see nothing but themselves."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, rows, 8, generator=generator)
    key, value = torch.randn(2, 3, 2, 11, 8, generator=generator).unbind(0)
    seen = torch.ones(3, 11).bool()
    seen[0, :6], seen[1, 7:], seen[2] = False, False, torch.arange(11) % 2 == 0
    found = attend.causal_attention(query, key, value, attend.Seen(seen), 0.3, block)
    apart = torch.arange(11 - rows, 11)[:, None] - torch.arange(11)
    sees = (apart == 0) | ((apart > 0) & seen[:, None])
    shared_key, shared_value = (each.repeat_interleave(2, 1) for each in (key, value))
    logits = (0.3 * query @ shared_key.mT).masked_fill(~sees[:, None], -torch.inf)
    assert torch.allclose(found, logits.softmax(-1) @ shared_value, atol=1e-5)


def states(rows, columns, heads=4, kv_heads=2, width=16, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, rows), (kv_heads, columns), (kv_heads, columns)
    return [torch.randn(2, *shape, width, generator=generator).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("kv_heads", "width", "dtype", "masked", "expected"),
    [
        (4, 128, torch.bfloat16, False, ("flash", "efficient")),
        (4, 128, torch.bfloat16, True, ("efficient",)),
        (2, 128, torch.bfloat16, False, ("flash",)),
        (2, 128, torch.bfloat16, True, ()),
        (2, 128, torch.float32, False, ()),
        (4, 128, torch.float32, False, ("efficient",)),
        (4, 20, torch.float16, False, ("flash",)),
        (4, 20, torch.float32, True, ("efficient",)),
        (4, 320, torch.bfloat16, False, ("efficient",)),
        (4, 64, torch.float64, False, ()),
    ],
)
def test_what_the_kernels_take(kv_heads, width, dtype, masked, expected):
    assert attend.fused_kernels(*states(3, 3, 4, kv_heads, width, dtype), masked) == expected


def test_a_gradient_and_autocast_are_asked_for():
    query, key, value = states(3, 3, width=224, dtype=torch.bfloat16)
    assert attend.fused_kernels(query, key, value) == ("flash",)
    assert attend.fused_kernels(query.requires_grad_(), key, value) == ()
    with torch.autocast("cpu", torch.bfloat16):
        assert attend.fused_kernels(*states(3, 3)) == ("flash",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(600, 600), (9, 9), (1, 1), (7, 9), (1, 9)])
def test_without_a_mask_it_is_causal_to_the_last_bit(rows, columns, dtype):
    query, key, value = states(rows, columns, dtype=dtype)
    mask = torch.arange(columns - rows, columns)[:, None] >= torch.arange(columns)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=0.3, enable_gqa=True
    )  # key heads that are shared
    for found in (attend.fused_attention(query, key, value, 0.3, mask), attend.fused_attention(query, key, value, 0.3)):
        assert torch.equal(found, expected)


def windowed(length, size):
    return attend.SlidingWindow(size, torch.arange(length).expand(2, -1))


@pytest.mark.parametrize("block", [4, 100])
@pytest.mark.parametrize("rows", [11, 40])
def test_what_a_window_hides_is_not_read(rows, block):
    """Columns that no row of a block sees are poisoned; a batch with padding may see any of them."""
    query, key, value = states(rows, 40)
    seen = attend.Seen(None, windowed(40, 6))
    expected = attend.causal_attention(query, key, value, seen, 0.3, block)
    padded = attend.Seen(torch.ones(2, 40).bool(), seen.window)
    assert torch.allclose(attend.causal_attention(query, key, value, padded, 0.3, block), expected, atol=1e-6)
    first = 40 - rows - 5
    if first > 0:
        key[:, :, :first], value[:, :, :first] = torch.nan, torch.nan
        assert torch.equal(attend.causal_attention(query, key, value, seen, 0.3, block), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("rows", [300, 77, 1])
def test_a_fused_kernel_runs_every_call_on_a_gpu(dtype, kv_heads, width, rows):
    """No mask, a mask, a window; heads shared or not."""
    given = states(rows, 300, 4, kv_heads, width, dtype, "cuda")
    seen = torch.ones(2, 300, dtype=torch.bool, device="cuda")
    seen[1, :40] = False
    for each in (
        attend.Seen(),
        attend.Seen(seen),
        attend.Seen(None, attend.SlidingWindow(50, torch.arange(300, device="cuda").expand(2, -1))),
    ):
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            found = attend.causal_attention(*given, each, width**-0.5, 64)
        wide = [x.double().cpu() for x in given]
        home = attend.Seen(None if each.places_BK is None else each.places_BK.cpu(), each.window and windowed(300, 50))
        expected = attend.causal_attention(*wide, home, width**-0.5, 64)
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found.double().cpu(), expected, atol=tolerance, rtol=tolerance)


B, H, HEADS, ROWS, K, WIDTH, SCALE = 2, 4, 2, 5, 12, 8, 0.3
CONTEXT = K - ROWS


def made(seed, dtype=torch.float32):
    query = random_scores(seed, B, H, ROWS, WIDTH, dtype=dtype)
    key, value = (random_scores(seed + i, B, HEADS, K, WIDTH, dtype=dtype) for i in (1, 2))
    keep = random_mask(seed + 3, B, HEADS, K)
    keep[..., CONTEXT:] = True
    visible = random_mask(seed + 4, B, K, share=0.9)
    visible[:, CONTEXT:] = True
    learns = visible & (torch.arange(K) < CONTEXT)
    return query, key, value, keep, visible, learns


def attention(query, key, value, keep, seen, block=3):
    return attend.causal_attention(query, key, value, attend.Seen(seen.places_BK, seen.window, keep), SCALE, block)


def plain(query, key, value, weight_BhK, seen):
    """Attention in which the place of a key counts so many times."""
    shares = H // HEADS
    key, value, weight = (x.repeat_interleave(shares, 1) for x in (key, value, weight_BhK))
    scores = query @ key.mT * SCALE
    probabilities = (scores.exp() * weight[:, :, None]).masked_fill(~seen.of_rows(K - ROWS, K, query.device), 0)
    return probabilities @ value / probabilities.sum(-1, keepdim=True)


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("block", [2, 64])
def test_slopes_of_kept_and_dropped_keys(size, block):
    query, key, value, keep, visible, learns = made(3)
    seen = attend.Seen(visible, None if size is None else attend.SlidingWindow(size, torch.arange(K).expand(B, K)))
    logits = random_scores(9, B, HEADS, K).requires_grad_()
    upstream = random_scores(11, B, H, ROWS, WIDTH)
    out = attention(query, key, value, keep, seen, block)
    found = attend.with_key_gradient(out, logits, (query, key, value), keep, learns, seen, SCALE, block)
    assert torch.equal(found, out)
    found.backward(upstream)
    sigmoid = logits.detach().sigmoid()
    slopes = logits.grad / (sigmoid * (1 - sigmoid))

    weight = keep.float().requires_grad_()
    exact = plain(query, key, value, weight, seen)
    assert torch.allclose(exact, out, atol=1e-5)
    (of_kept,) = torch.autograd.grad((exact * upstream).sum(), weight)
    assert not slopes[~learns[:, None].expand_as(slopes)].any()
    for b, head, place in (learns[:, None] & torch.ones_like(keep)).nonzero().tolist():
        expected, back = of_kept[b, head, place], keep.float()
        if not keep[b, head, place]:
            back[b, head, place] = 1
            expected = ((plain(query, key, value, back, seen) - exact) * upstream).sum()
        assert torch.allclose(slopes[b, head, place], expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("devices", [(), ("cpu",)])
@pytest.mark.parametrize("size", [None, 8])
def test_a_head_reads_its_own_keys_alone(size, devices, dtype, monkeypatch):
    """Rows that are asked too may be gone for others, a head may have no key, a key head may serve all."""
    monkeypatch.setattr(attend, "DEVICES", devices)
    query, key, value, _, visible, _ = made(7, dtype)
    keep, own = random_mask(13, B, HEADS, K), torch.eye(K, dtype=torch.bool)[CONTEXT:]
    keep[1, 0] = False
    seen = attend.Seen(visible, None if size is None else attend.SlidingWindow(size, torch.arange(K).expand(B, K)))
    mask = (seen.of_rows(CONTEXT, K, query.device) & keep[:, :, None]) | own
    for heads, other, marks in ((2, mask, keep), (1, mask[:, :1], keep[:, :1])):
        few = key[:, :heads].clone(), value[:, :heads].clone()
        expected = attend.fused_attention(query, *few, SCALE, other.repeat_interleave(H // heads, 1))
        with torch.no_grad():
            found = attention(query, *few, marks, seen, 2)
        torch.testing.assert_close(found, expected, atol=max(1e-6, torch.finfo(dtype).eps), rtol=1e-6)
    assert not keep[1, 0].any()


def test_queries_keys_and_values_learn_as_without_it():
    query, key, value, keep, visible, learns = made(5)
    seen, grads = attend.Seen(visible), []
    for with_logits in (False, True):
        states = [x.clone().requires_grad_() for x in (query, key, value)]
        out = attention(*states, keep, seen)
        if with_logits:
            logits = torch.zeros(B, HEADS, K, requires_grad=True)
            out = attend.with_key_gradient(out, logits, tuple(states), keep, learns, seen, SCALE, 4)
        out.pow(2).sum().backward()
        grads.append([x.grad for x in states])
    assert all(torch.equal(own, other) for own, other in zip(*grads, strict=True))


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
def test_blocks_are_the_dense_rows_and_keys_receive_their_columns(problem, block, data):
    """Any rows, any keys (empty sets too), any block size; every marked row once; queries may be of the last rows."""
    query, key, rows, keys = problem
    offset, everything = data.draw(st.integers(0, query.shape[2] - 1)), data.draw(st.booleans())
    query, rows, keys = query[:, :, offset:], rows[:, offset:] | everything, keys | everything
    expected = dense(problem[0], key, keys, 0.7)[:, :, offset:] * rows[:, None, :, None]
    given = query, key, rows, keys, 0.7, offset, None
    weight = torch.arange(rows.numel()).view_as(rows) % 7 / 3
    most, torch_alone = data.draw(st.sampled_from([None, int(rows.sum(-1).max())])), data.draw(st.booleans())
    for device in ("cuda", "cpu"):  # what is done on such a device: of a GPU nothing is read
        patched = patch.multiple("subtoken_train.functional.causal_attention", BLOCK=block, DEVICES=(device,))
        with patched, unread() if device == "cpu" else nullcontext():
            receive = attend.attention_received if torch_alone or device == "cpu" else received
            sums, weighted, largest = (receive(*given, *how, most=most) for how in ((), (weight,), (None, True)))
            blocks = list(attend.attention_blocks(*given, most))
        matrix, times = collect(blocks, expected)
        assert torch.equal(times, rows.long())
        assert torch.allclose(matrix, expected, atol=1e-6)
        taken = sum(index.shape[1] for index, _ in blocks)
        assert device == "cpu" or taken == rows.sum(-1).max()  # what may be counted is
        for found, columns in ((sums, expected), (weighted, expected * weight[:, None, :, None])):
            assert torch.allclose(found, columns.sum(2).float(), atol=1e-5)
        assert torch.allclose(largest, expected.amax(2).float(), atol=1e-6)


def test_bf16_inputs_are_computed_in_fp32_and_large_scores_do_not_overflow():
    (query, key), everything = tensors(2, 4, 2, 20, dtype=torch.bfloat16), torch.ones(2, 20, dtype=torch.bool)
    places = torch.arange(20).expand(2, -1)
    rows = attend.attention_rows(query, key, places, everything, 0.5)
    assert torch.allclose(rows.double(), dense(query, key, everything, 0.5), atol=1e-6)
    rows = attend.attention_rows(query.float() * 1e3, key.float() * 1e3, places, everything, 1.0)
    assert torch.allclose(rows.sum(-1), torch.ones(2, 4, 20))


@pytest.mark.parametrize(("block", "length"), [(8, 300), (attend.BLOCK, 1500)])
def test_memory_is_a_block_of_rows(block, length, monkeypatch):
    """The largest tensor holds heads x block x N elements: less than one N x N matrix."""
    monkeypatch.setattr("subtoken_train.functional.causal_attention.BLOCK", block)
    query, key = tensors(1, 4, 2, length, width=2)
    everything = torch.ones(1, length, dtype=torch.bool)
    with LargestTensor() as largest:
        blocks = attend.attention_blocks(query, key, everything, everything, 1.0)
        rows = sum(index.shape[1] for index, _ in blocks)
    assert rows == length
    assert largest.elements == 4 * block * length < length * length
