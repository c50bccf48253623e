"""Accumulation windows: what each micro-batch is told about its optimiser step."""

from types import SimpleNamespace

import pytest
import torch

from subtoken_train.datasets.loaders import AccumulationWindows


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
