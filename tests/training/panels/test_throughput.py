"""The clock of a run, and the peak of a device."""

import torch

from subtoken_train.training.panels.throughput import Stopwatch, peak_flops


def test_stopwatch_leaves_pauses_out(monkeypatch):
    times = iter([10.0, 12.0, 17.0, 20.0])
    monkeypatch.setattr("subtoken_train.training.panels.throughput.time.perf_counter", lambda: next(times))
    watch = Stopwatch()
    with watch.pause():
        pass
    assert watch.seconds() == 20 - 10 - 5


def test_a_cpu_has_no_peak():
    assert peak_flops(torch.device("cpu"), torch.float32) is None
