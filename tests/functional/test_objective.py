"""The objective: cross-entropy, distillation and balance, against plain loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.masks import fixed_mask, global_mask
from subtoken_train.functional.objective import (
    IGNORE_INDEX,
    answer_loss,
    balance_loss,
    distillation_loss,
    predicting_rows,
)
from subtoken_train.routing.state import RoutingState
from tests.support.helpers import random_mask, random_scores


@settings(max_examples=50, deadline=None)
@given(batch=st.integers(1, 3), length=st.integers(1, 6), vocabulary=st.integers(2, 9), seed=st.integers(0, 1000))
def test_equals_the_plain_sum(batch, length, vocabulary, seed):
    logits = 4 * random_scores(seed, batch, length, vocabulary)
    ids = random_scores(seed, batch, length, levels=vocabulary, dtype=torch.int64)
    labels = torch.where(random_mask(seed, batch, length), ids, IGNORE_INDEX)
    expected, count = 0.0, 0
    for sample in range(batch):
        for position in range(1, length):
            target = int(labels[sample, position])
            if target != IGNORE_INDEX:
                row = logits[sample, position - 1].double()
                expected += float(row.logsumexp(0) - row[target])
                count += 1
    rows, targets = predicting_rows(labels)
    assert rows.sum() == len(targets) == count
    assert abs(float(answer_loss(logits[rows], targets)) - expected) < 1e-4


def test_bf16_logits_are_summed_in_fp32():
    logits, targets = random_scores(0, 400, 7).bfloat16(), torch.zeros(400, dtype=torch.long)
    total = answer_loss(logits, targets)
    assert total.dtype == torch.float32
    assert torch.equal(total, answer_loss(logits.float(), targets))


SIZES = {"targets": st.integers(0, 5), "vocabulary": st.integers(1, 9), "seed": st.integers(0, 10_000)}
TEMPERATURES = st.floats(0.2, 8)


def slow_loss(student, teacher, temperature):
    """T^2 times the sum of p log(p / q), entry by entry."""
    total = 0.0
    for ours, theirs in zip(student.tolist(), teacher.tolist(), strict=True):
        q, p = ([math.exp((x - max(row)) / temperature) for x in row] for row in (ours, theirs))
        q, p = ([x / sum(row) for x in row] for row in (q, p))
        total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return temperature**2 * total


@settings(max_examples=60, deadline=None)
@given(temperature=TEMPERATURES, dtype=st.sampled_from([torch.float32, torch.bfloat16]), **SIZES)
def test_divergence_equals_the_loops(targets, vocabulary, seed, temperature, dtype):
    student, teacher = (random_scores(seed + i, targets, vocabulary, dtype=dtype) for i in range(2))
    found = distillation_loss(student, teacher, temperature)
    assert found.dtype == torch.float32
    expected = slow_loss(student.float(), teacher.float(), temperature)
    assert found.item() == pytest.approx(expected, abs=1e-4 * temperature**2, rel=1e-4)


@settings(max_examples=40, deadline=None)
@given(temperature=TEMPERATURES, **SIZES)
def test_the_gradient_is_t_times_the_difference_of_probabilities_and_the_students_alone(
    targets, vocabulary, seed, temperature
):
    student, teacher = (random_scores(seed + i, targets, vocabulary).requires_grad_() for i in range(2))
    distillation_loss(student, teacher, temperature).backward()
    soft = [(logits.detach().double() / temperature).softmax(-1) for logits in (student, teacher)]
    assert torch.allclose(student.grad, (temperature * (soft[0] - soft[1])).float(), atol=1e-4)
    assert teacher.grad is None


@st.composite
def batches(draw, max_batch=4):
    """(logits, hard mask, routed tokens) of one layer, under either budget."""
    batch, length, num_groups = draw(st.integers(2, max_batch)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    seed = draw(st.integers(0, 10_000))
    logits, routed = 3 * random_scores(seed, batch, length, num_groups), random_mask(seed, batch, length)
    kept = draw(st.integers(1, num_groups))
    hard = fixed_mask(logits, kept) if draw(st.booleans()) else global_mask(logits, kept, routed)
    return logits, hard, routed


def slow_balance(logits_NS, hard_NS, routed_N):
    """One sample's loss, token by token."""
    num_groups = len(logits_NS[0])
    tokens = [n for n in range(len(logits_NS)) if routed_N[n]]
    selections = sum(int(hard_NS[n].sum()) for n in tokens)
    if not selections:
        return 0.0
    loss = 0.0
    for group in range(num_groups):
        share = sum(bool(hard_NS[n, group]) for n in tokens) / selections
        probability = sum(torch.softmax(logits_NS[n].double(), -1)[group].item() for n in tokens) / len(tokens)
        loss += num_groups * share * probability
    return loss


@settings(max_examples=50, deadline=None)
@given(batch=batches())
def test_balance_equals_the_loops(batch):
    losses = balance_loss(*batch)
    expected = [slow_balance(logits, hard, routed) for logits, hard, routed in zip(*batch, strict=True)]
    assert torch.allclose(losses, torch.tensor(expected), atol=1e-5)


def state_of(*layers):
    """What a pass leaves behind where ``layers`` chose by these (logits, hard mask, routed tokens)."""
    routed = layers[0][2]
    nothing = torch.zeros_like(routed)
    places = torch.arange(routed.shape[1]).expand(routed.shape)
    return RoutingState(routed, nothing, places, places[:, 0], choices=dict(enumerate(layers)))


@settings(max_examples=50, deadline=None)
@given(first=batches(), cut=st.integers(0, 4))
def test_layers_are_those_of_a_loop(first, cut):
    """A layer above a cut has fewer rows; it may leave tokens of which a global budget chose no group."""
    second = tuple(part[:, cut:] if cut < part.shape[1] else part for part in first)
    state = state_of(first, second)
    expected = torch.stack([balance_loss(*layer) for layer in (first, second)])
    assert torch.allclose(state.balances(), expected, atol=1e-5)
    assert torch.equal(state.mean_balance(), state.balances().mean())


def test_routed_tokens_of_which_no_group_is_chosen_give_zero():
    """A global budget may leave a token without a group; where a cut leaves only such tokens, no share is left."""
    logits, hard = random_scores(0, 2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.bool)
    routed = torch.ones(2, 3, dtype=torch.bool)
    assert balance_loss(logits, hard, routed).tolist() == [0.0, 0.0]
    assert state_of((logits, hard, routed)).mean_balance().item() == 0.0


def test_a_sample_without_routed_tokens_gives_zero_and_a_zero_gradient():
    logits = random_scores(0, 2, 3, 4).requires_grad_()
    routed = torch.tensor([[False] * 3, [True] * 3])
    losses = balance_loss(logits, fixed_mask(logits.detach(), 1), routed)
    assert losses[0].item() == 0
    losses[0].backward(retain_graph=True)
    assert logits.grad is not None
    assert not logits.grad.any()
    losses[1].backward()
    assert not logits.grad[0].any()
    assert logits.grad[1].any()


def test_computed_in_fp32_from_bf16_logits():
    logits, routed = random_scores(0, 1, 8, 4).bfloat16(), torch.ones(1, 8, dtype=torch.bool)
    loss = balance_loss(logits, fixed_mask(logits, 2), routed)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, balance_loss(logits.float(), fixed_mask(logits, 2), routed))
