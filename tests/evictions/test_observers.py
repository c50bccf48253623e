"""Rows that ask, the last of marked places, and sums over rows against the dense matrix."""

import pytest
import torch

from subtoken_train.evictions.observers import column_sums, task_rows, unasked
from subtoken_train.functional.attention_statistics import attention_blocks
from tests.support.helpers import random_mask, random_scores
from tests.support.prompt_views import PROMPTS, dense_attention

EXPECTED = {
    "text before and after": range(23, 29),
    "two images": range(22, 27),
    "one text token after": [17],
    "image last": [14],
    "no image": range(14),
    "context": range(18, 25),
}


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("shift", [0, 4])
def test_task_rows(name, shift):
    regions = torch.tensor([[0] * shift + PROMPTS[name] + [0] * 3])
    assert (task_rows(regions)[0].nonzero()[:, 0] - shift).tolist() == list(EXPECTED[name])


def test_prompts_without_a_question():
    width = max(map(len, PROMPTS.values()))
    for left in (0, 1):
        codes = [[0] * left * (width - len(x)) + x + [0] * (1 - left) * (width - len(x)) for x in PROMPTS.values()]
        assert unasked(torch.tensor(codes)).tolist() == [name == "image last" for name in PROMPTS]
    assert not unasked(torch.zeros(1, 3, dtype=torch.long)).any()


def test_rows_that_are_no_entry_do_not_ask():
    assert task_rows(torch.tensor([[2, 4, 0, 4], [1, 2, 0, 0], [0, 0, 0, 0]])).tolist() == [
        [False, True, False, True],
        [False, True, False, False],
        [False] * 4,
    ]


@pytest.mark.parametrize("block", [1, 3, 64])
@pytest.mark.parametrize("weighted", [False, True])
def test_column_sums(block, weighted):
    query, key = random_scores(1, 2, 4, 12, 6), random_scores(2, 2, 2, 12, 6)
    rows, keys, weight = random_mask(3, 2, 12), random_mask(4, 2, 12), random_scores(5, 2, 12)
    rows[0, 5:] = False
    sums = column_sums(attention_blocks(query, key, rows, keys, 0.4, block), weight if weighted else None)
    for i in range(2):
        matrix = dense_attention(query[i], key[i], keys[i], 0.4)
        factor = (weight[i] if weighted else torch.ones(12)) * rows[i]
        assert torch.allclose(sums[i], (matrix * factor[:, None]).sum(1), atol=1e-5)
