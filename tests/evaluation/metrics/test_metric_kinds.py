"""Means over samples, and samples put together beside a plain dictionary."""

import os
import socket
from collections import defaultdict
from datetime import timedelta

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.metrics.choices import MMBenchScores
from subtoken_train.evaluation.metrics.metric import bits_of, group_key, groups_of
from subtoken_train.evaluation.metrics.short_answers import ANLS, RelaxedAccuracy

PREDICTIONS = ["0.28", "itc", "cat", "5", "new  york"]
ANSWERS = [["0.28"], ["ITC Limited", "itc ltd"], ["dog"], ["5"], ["new york"]]
CHARTS = [("1", "1", "human"), ("2", "9", "human"), ("3", "3", "human"), ("4", "4", "augmented"), ("5", "0", "human")]


def scores_of(rank, processes):
    """Both metrics over this process's share: with two, only one of them sees an augmented question."""
    anls, relaxed = ANLS(), RelaxedAccuracy()
    for i in range(rank, len(PREDICTIONS), processes):
        anls.update([PREDICTIONS[i]], [{"answers": ANSWERS[i]}])
        prediction, answer, kind = CHARTS[i]
        relaxed.update([prediction], [{"answer": answer, "kind": kind}])
    return {name: value.item() for metric in (anls, relaxed) for name, value in metric.compute().items()}


def one_of_two(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=limit)
    torch.save(scores_of(rank, 2), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_score_as_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(one_of_two, (port, tmp_path), nprocs=2)
    expected = scores_of(0, 1)
    assert expected.keys() == {"lmms_anls", "llava_anls", "relaxed_accuracy", "human", "augmented"}
    for rank in (0, 1):
        assert torch.load(tmp_path / f"{rank}.pt") == pytest.approx(expected, abs=1e-12)


def test_one_batch_or_many():
    metric = ANLS()
    metric.update(PREDICTIONS, [{"answers": answers} for answers in ANSWERS])
    whole = metric.compute()
    parts = scores_of(0, 1)
    assert whole["lmms_anls"].item() == pytest.approx(parts["lmms_anls"], abs=1e-12)
    assert metric.score("cat", {"answers": ["dog"]}) == 0
    metric.reset()
    metric.update(["5"], [{"answers": ["5"]}])
    assert metric.compute()["lmms_anls"] == 1


def test_a_prediction_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="zip"):
        ANLS().update(["a", "b"], [{"answers": ["a"]}])


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
