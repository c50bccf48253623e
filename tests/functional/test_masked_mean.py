"""The mean of marked rows, beside a loop."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.gather import masked_mean
from tests.support.helpers import random_mask, random_scores


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5)),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_mean_is_that_of_a_loop(sizes, seed, dtype):
    rows, mask = random_scores(seed, *sizes).to(dtype), random_mask(seed, *sizes[:2])
    found = masked_mean(rows, mask)
    assert found.dtype == torch.float32
    for sample in range(sizes[0]):
        own = [rows[sample, n].double() for n in range(sizes[1]) if mask[sample, n]]
        expected = sum(own) / len(own) if own else torch.zeros(sizes[2], dtype=torch.double)
        assert torch.allclose(found[sample].double(), expected, atol=1e-5)


def test_only_marked_rows_get_a_gradient_and_autocast_lowers_nothing():
    rows = random_scores(0, 1, 3, 2).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean = masked_mean(rows, torch.tensor([[True, False, True]]))
    assert torch.equal(mean, (rows[:, 0] + rows[:, 2]) / 2)
    mean.sum().backward()
    assert torch.equal(rows.grad[0, :, 0], torch.tensor([0.5, 0.0, 0.5]))
