"""Straight-through masks: exactly 0 or 1 forwards, the sigmoid's slope backwards."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.masks import straight_through
from tests.support.helpers import random_mask, random_scores

LOGITS = st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=20)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@settings(max_examples=100, deadline=None)
@given(numbers=LOGITS, dtype=DTYPES, seed=st.integers(0, 1000))
def test_value_is_the_hard_mask_and_gradient_the_sigmoids(numbers, dtype, seed):
    logits = torch.tensor(numbers).to(dtype).requires_grad_()
    hard = random_mask(seed, len(numbers), share=0.5)
    gate = straight_through(hard, logits)
    assert gate.dtype == dtype
    assert torch.equal(gate, hard.to(dtype))

    upstream = torch.arange(1, len(numbers) + 1, dtype=dtype)
    gate.backward(upstream)
    soft = torch.tensor(numbers).to(dtype).double().sigmoid()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    expected = (soft * (1 - soft) * upstream.double()).to(dtype)
    assert torch.allclose(logits.grad, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), learns=st.booleans())
def test_equals_the_formula_of_the_method(seed, learns):
    """``hard + (soft - soft.detach())``, where it learns; bit for bit."""
    hard, learned = random_mask(seed, 2, 5, 4), random_mask(seed + 1, 2, 5, 1) if learns else None
    ours, theirs = (random_scores(seed, 2, 5, 4).requires_grad_() for _ in range(2))
    soft = theirs.sigmoid()
    expected = hard.float() + (soft - soft.detach())
    expected = expected if learned is None else torch.where(learned, expected, hard.float())
    found = straight_through(hard, ours, learned)
    assert torch.equal(found, expected)
    upstream = random_scores(seed + 2, 2, 5, 4)
    found.backward(upstream)
    expected.backward(upstream)
    assert torch.equal(ours.grad, theirs.grad)
