"""The divergence from a teacher against loops, its gradient against the closed form, and its least value."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.objective import distillation_loss
from tests.support.helpers import random_scores

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
def test_equals_the_loops(targets, vocabulary, seed, temperature, dtype):
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
