"""The standardised log norm: statistics per sample over routed pairs only, and an order that is the norms' own."""

import statistics

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.group_norms import standardised_log
from subtoken_train.functional.masks import counted_mask, fixed_mask, global_mask
from tests.support.helpers import random_mask, random_scores

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 9))


@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.5, 1.0]), bf16=st.booleans())
def test_equals_the_statistics_of_each_sample(sizes, seed, share, bf16):
    norms = random_scores(seed, *sizes).exp().to(torch.bfloat16 if bf16 else torch.float32)
    routed = random_mask(seed, *sizes[:2], share=share)
    prior = standardised_log(norms, routed)
    assert prior.dtype == torch.float32
    assert not prior[~routed].any()
    for sample in range(sizes[0]):
        logs = norms[sample][routed[sample]].float().log().flatten().tolist()
        if not logs:
            continue
        mean, deviation = statistics.fmean(logs), statistics.pstdev(logs)
        expected = torch.tensor([(log - mean) / max(deviation, 1e-4) for log in logs])
        assert torch.allclose(prior[sample][routed[sample]].flatten(), expected, atol=1e-3)


def test_every_budget_chooses_as_the_norms_do():
    norms = random_scores(0, 2, 7, 8).exp()
    routed = torch.ones(2, 7, dtype=torch.bool)
    prior = standardised_log(norms, routed)
    counts = torch.tensor([[8, 6, 4, 3, 2, 1, 0]] * 2)
    assert torch.equal(fixed_mask(prior, 3), fixed_mask(norms, 3))
    assert torch.equal(global_mask(prior, 3, routed), global_mask(norms, 3, routed))
    assert torch.equal(counted_mask(prior, counts), counted_mask(norms, counts))


def test_equal_and_vanishing_norms_stay_finite():
    routed = torch.ones(1, 2, dtype=torch.bool)
    for norm in (0.0, 3.0):
        assert standardised_log(torch.full((1, 2, 4), norm), routed).abs().max() < 0.02
    silent = torch.tensor([[[0.0, 1.0], [2.0, 3.0]]])
    assert standardised_log(silent, routed).isfinite().all()


def test_no_gradient():
    norms = random_scores(0, 1, 2, 4).exp().requires_grad_()
    assert not standardised_log(norms, torch.ones(1, 2, dtype=torch.bool)).requires_grad
