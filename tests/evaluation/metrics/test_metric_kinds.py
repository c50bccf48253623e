"""Samples put together, beside a plain dictionary."""

from collections import defaultdict

import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.metrics.choices import MMBenchScores
from subtoken_train.evaluation.metrics.metric import bits_of, group_key, groups_of

SAMPLES = st.lists(st.tuples(st.integers(-(2**62), 2**62) | st.integers(0, 3), st.integers(0, 7)), max_size=30)


@given(SAMPLES)
def test_equal_to_a_dictionary(samples):
    members = defaultdict(list)
    for key, marks in samples:
        members[key].append([bool(marks & 1 << bit) for bit in range(3)])
    keys_N = torch.tensor([key for key, _ in samples], dtype=torch.int64)
    marks_N = torch.tensor([marks for _, marks in samples], dtype=torch.int64)
    groups = groups_of(keys_N, bits_of(marks_N, 3))
    for i, key in enumerate(sorted(members)):
        assert groups.sizes_G[i] == len(members[key])
        assert groups.count_GM[i].tolist() == [sum(column) for column in zip(*members[key], strict=True)]
        assert groups.all_GM[i].tolist() == [all(column) for column in zip(*members[key], strict=True)]
    assert len(groups.sizes_G) == len(members)


def test_keys_are_the_same_in_every_process():
    assert group_key("OCR/0001.jpg") == 6386889048964939424
    assert group_key("a") != group_key("b")


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("ABZ")), min_size=1, max_size=20))
def test_circular_is_never_above_vanilla_of_whole_groups(rows):
    """Every question has two rows, so a question counts for both scores alike."""
    metric = MMBenchScores()
    rows = dict(rows).items()
    for question, letter in rows:
        for rotation in (0, 1_000_000):
            reference = {"index": question + rotation, "answer": "A", "options": {"A": "cat", "B": "dog"}}
            metric.update(["A" if rotation else letter], [reference])
    scores = metric.compute()
    assert scores["circular"] <= scores["accuracy"]
    assert scores["circular"].item() == sum(letter == "A" for _, letter in rows) / len(rows)
