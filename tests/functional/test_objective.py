"""The objective: cross-entropy, distillation and balance, against plain loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.functional import objective
from subtoken_train.functional.masks import fixed_mask, global_mask
from subtoken_train.functional.objective import IGNORE_INDEX, answer_loss, balance_loss, distillation_loss
from subtoken_train.routing.bank import RoutingState
from tests.support.helpers import random_mask, random_scores

SEEDS = st.integers(0, 10_000)
SIZES = {"targets": st.integers(0, 5), "vocabulary": st.integers(1, 9), "seed": SEEDS}


@given(batch=st.integers(1, 3), length=st.integers(1, 6), vocabulary=st.integers(2, 9), seed=SEEDS)
def test_answers_cost_the_plain_sum(batch, length, vocabulary, seed):
    logits = 4 * random_scores(seed, batch, length, vocabulary)
    ids = random_scores(seed, batch, length, levels=vocabulary, dtype=torch.int64)
    labels = torch.where(random_mask(seed, batch, length), ids, IGNORE_INDEX)
    pairs = [(logits[b, n - 1].double(), int(labels[b, n])) for b in range(batch) for n in range(1, length)]
    losses = [float(row.logsumexp(0) - row[target]) for row, target in pairs if target != IGNORE_INDEX]
    rows, targets = objective.predicting_rows(labels)
    assert rows.sum() == len(targets) == len(losses)
    assert abs(float(answer_loss(logits[rows], targets)) - sum(losses)) < 1e-4


@given(temperature=st.floats(0.2, 8), dtype=st.sampled_from([torch.float32, torch.bfloat16]), **SIZES)
def test_divergence_equals_the_loops(targets, vocabulary, seed, temperature, dtype):
    """T^2 times the sum of p log(p / q), in fp64."""
    student, teacher = (random_scores(seed + i, targets, vocabulary, dtype=dtype) for i in range(2))
    found = distillation_loss(student, teacher, temperature)
    assert found.dtype == torch.float32
    q, p = ((each.float().double() / temperature).softmax(-1) for each in (student, teacher))
    expected = temperature**2 * float((p * (p / q).log()).sum())
    assert found.item() == pytest.approx(expected, abs=1e-4 * temperature**2, rel=1e-4)


@st.composite
def batches(draw):
    """(logits, hard mask, routed tokens) of one layer, under either budget."""
    batch, length, num_groups = draw(st.integers(2, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    seed, kept = draw(SEEDS), draw(st.integers(1, num_groups))
    logits, routed = 3 * random_scores(seed, batch, length, num_groups), random_mask(seed, batch, length)
    return logits, fixed_mask(logits, kept) if draw(st.booleans()) else global_mask(logits, kept, routed), routed


def slow_balance(logits_NS, hard_NS, routed_N):
    """One sample's loss, group by group."""
    chosen_nS, chances_nS = hard_NS[routed_N].double(), logits_NS[routed_N].double().softmax(-1)
    shares_S = chosen_nS.sum(0) / max(1, int(chosen_nS.sum()))
    return len(shares_S) * float(shares_S @ chances_nS.sum(0)) / max(1, len(chances_nS))


@given(first=batches(), cut=st.integers(0, 4))
def test_balance_equals_the_loops_in_every_layer(first, cut):
    """A layer above a cut has fewer rows; it may leave tokens of which a global budget chose no group."""
    layers = [first, tuple(part[:, cut:] if cut < part.shape[1] else part for part in first)]
    losses = torch.stack([balance_loss(*layer) for layer in layers])
    assert torch.allclose(
        losses, torch.tensor([[slow_balance(*own) for own in zip(*x, strict=True)] for x in layers]), atol=1e-5
    )
    routed = first[2]
    places = torch.arange(routed.shape[1]).expand(routed.shape)
    state = RoutingState(routed, routed & False, places, places[:, 0], choices=dict(enumerate(layers)))
    assert torch.allclose(state.balances(), losses, atol=1e-5)
    assert torch.equal(state.mean_balance(), state.balances().mean())


def test_a_sample_without_a_choice_gives_zero_and_a_zero_gradient():
    """Of no routed token, and of routed ones of which a global budget chose no group."""
    logits = random_scores(0, 3, 3, 4).requires_grad_()
    routed, hard = torch.tensor([[False] * 3, [True] * 3, [True] * 3]), fixed_mask(logits.detach(), 1)
    losses = balance_loss(logits, hard & torch.tensor([True, True, False])[:, None, None], routed)
    assert losses[[0, 2]].tolist() == [0, 0]
    losses[0].backward(retain_graph=True)
    assert not logits.grad.any()
    losses[1].backward()
    assert logits.grad.any((1, 2)).tolist() == [False, True, False]
