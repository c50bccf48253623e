"""Accumulation windows, and workers that outlive a stop signal."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from subtoken_train.datasets.ordered import AccumulationWindows, outlive_stop_signals


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 4, 1), (4, 5, 1)]),
        (2, [(0, 3, 2), (1, 3, 2), (2, 7, 2), (3, 7, 2), (4, 5, 1)]),
    ],
)
def test_every_batch_knows_its_windows_tokens_and_size(size, expected):
    batches = []
    for labelled in range(1, 6):
        labels_BN = torch.full((2, 8), -100)
        labels_BN[1, 1 : 1 + labelled] = 9
        labels_BN[0, 0] = 9  # never a target
        batches.append(SimpleNamespace(labels_BN=labels_BN, place=labelled - 1))
    windows = AccumulationWindows(batches, size)
    assert [(batch.place, tokens, length) for batch, tokens, length in windows] == expected
    assert len(windows) == 5


def test_a_start_inside_a_window_is_refused():
    first = 4
    windows = AccumulationWindows([], 2, lambda: first)
    assert list(windows) == []
    first = 5
    with pytest.raises(ValueError, match="micro-batch 5 of the epoch, inside an accumulation window of 2; resume from"):
        list(windows)


def test_a_worker_outlives_all_but_the_second_sigterm():
    child = os.fork()
    if child == 0:
        outlive_stop_signals(0)
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.3)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
