"""The objective against a plain sum over labelled positions."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.objective import IGNORE_INDEX, answer_loss, predicting_rows
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


def test_without_labels_the_count_is_zero_and_the_loss_still_has_a_gradient():
    logits = random_scores(0, 2, 4, 5).requires_grad_()
    rows, targets = predicting_rows(torch.full((2, 4), IGNORE_INDEX))
    total = answer_loss(logits[rows], targets)
    assert (total.item(), len(targets)) == (0, 0)
    total.backward()
    assert not logits.grad.any()


def test_a_label_on_the_first_row_has_no_predecessor():
    labels = torch.tensor([[3, IGNORE_INDEX, IGNORE_INDEX]])
    rows, targets = predicting_rows(labels)
    assert not rows.any()
    assert len(targets) == 0


def test_bf16_logits_are_summed_in_fp32():
    logits, targets = random_scores(0, 400, 7).bfloat16(), torch.zeros(400, dtype=torch.long)
    total = answer_loss(logits, targets)
    assert total.dtype == torch.float32
    assert torch.equal(total, answer_loss(logits.float(), targets))
