"""Means over samples: in parts, over two processes, over many samples."""

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed
import torch.multiprocessing

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
