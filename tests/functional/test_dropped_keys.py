"""The gradient of a choice among keys: the derivative of kept ones, and what a dropped one alone would change."""

import pytest
import torch

from subtoken_train.functional.causal_attention import Seen, SlidingWindow, causal_attention
from subtoken_train.functional.dropped_keys import with_key_gradient
from tests.support.helpers import random_mask, random_scores

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
    return causal_attention(query, key, value, Seen(seen.places_BK, seen.window, keep), SCALE, block)


def plain(query, key, value, weight_BhK, seen):
    """Attention in which the place of a key counts so many times."""
    shares = H // HEADS
    key, value, weight = (x.repeat_interleave(shares, 1) for x in (key, value, weight_BhK))
    scores = query @ key.mT * SCALE
    shown = seen.of_rows(K - ROWS, K, query.device)
    probabilities = (scores.exp() * weight[:, :, None]).masked_fill(~shown, 0)
    return probabilities @ value / probabilities.sum(-1, keepdim=True)


@pytest.mark.parametrize("size", [None, 8])
@pytest.mark.parametrize("block", [2, 64])
def test_slopes_of_kept_and_dropped_keys(size, block):
    query, key, value, keep, visible, learns = made(3)
    seen = Seen(visible, None if size is None else SlidingWindow(size, torch.arange(K).expand(B, K)))
    logits = random_scores(9, B, HEADS, K).requires_grad_()
    upstream = random_scores(11, B, H, ROWS, WIDTH)
    out = attention(query, key, value, keep, seen, block)
    found = with_key_gradient(out, logits, (query, key, value), keep, learns, seen, SCALE, block)
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


def test_queries_keys_and_values_learn_as_without_it():
    query, key, value, keep, visible, learns = made(5)
    seen, grads = Seen(visible), []
    for with_logits in (False, True):
        states = [x.clone().requires_grad_() for x in (query, key, value)]
        out = attention(*states, keep, seen)
        if with_logits:
            logits = torch.zeros(B, HEADS, K, requires_grad=True)
            out = with_key_gradient(out, logits, tuple(states), keep, learns, seen, SCALE, 4)
        out.pow(2).sum().backward()
        grads.append([x.grad for x in states])
    assert all(torch.equal(own, other) for own, other in zip(*grads, strict=True))


def test_bf16_states_under_autocast():
    query, key, value, keep, visible, learns = made(7, torch.bfloat16)
    seen, found = Seen(visible), {}
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(B, HEADS, K, requires_grad=True)
        states = tuple(x.to(dtype) for x in (query, key, value))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = attention(*states, keep, seen)
            with_key_gradient(out, logits, states, keep, learns, seen, SCALE, 4).float().pow(2).sum().backward()
        found[dtype] = logits.grad
    assert torch.allclose(found[torch.bfloat16], found[torch.float32], atol=2e-2, rtol=5e-2)
