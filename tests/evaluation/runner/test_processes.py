"""Each process has a device of its own."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.evaluation.runner.processes import ONE, Processes


def test_the_work_is_divided():
    four = [Processes(rank, 4) for rank in range(4)]
    assert all(sum(process.mine(number) for process in four) == 1 for number in range(11))


def test_without_a_gpu_all_are_on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [ONE.device(wanted) for wanted in (None, "auto", "cpu")] == ["cpu", "auto", "cpu"]


@pytest.mark.parametrize("wanted", [None, "auto", "cuda"])
def test_each_process_takes_its_own_gpu(monkeypatch, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # the second machine of two, with two GPUs each
    assert [Processes(rank, 4, rank % 2).device(wanted) for rank in (2, 3)] == ["cuda:0", "cuda:1"]


def test_one_gpu_for_all_is_refused():
    assert ONE.device("cuda:1") == "cuda:1"
    with pytest.raises(ValueError, match="device cuda:1 for 2 processes"):
        Processes(0, 2).device("cuda:1")
    assert Processes(1, 2).device("cpu") == "cpu"


def test_what_names_no_device_goes_to_the_own_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    for process in (Processes(0, 2, 0), Processes(1, 2, 1), ONE):
        with process:
            pass
    assert chosen == [0, 1]
