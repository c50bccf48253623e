"""Pre-flight computations that do not show in ``check`` on the shipped recipes."""

import pytest
import torch

from subtoken_train.ledger.kv_budget import KVBudget, KVShape
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.training.preflight import StepPlan, count_devices, layer_bands, plan_steps


def test_layer_bands_cover_every_layer_once():
    ledger = nominal_ledger(KVShape(5, 2, 8), {"system": 3, "visual": 16}, KVBudget(0.25, 4, 1), cut_layer=1)
    bands = layer_bands(ledger)
    assert [(band.first, band.last) for band in bands] == [(0, 0), (1, 4)]
    assert [row.region for row in bands[1].rows] == ["system", "visual"]
    total = sum((band.last - band.first + 1) * sum(row.payload_bytes for row in band.rows) for band in bands)
    assert total == ledger.bytes_of(with_index=False)


@pytest.mark.parametrize(
    ("devices", "accelerator", "nodes", "count"),
    [
        (2, "gpu", 1, 2),
        ("4", "gpu", 2, 8),
        ("0,3", "gpu", 1, 2),
        ([1, 2, 3], "gpu", 1, 3),
        ("auto", "cpu", 1, 1),
        (-1, "cpu", 2, 2),
    ],
)
def test_count_devices(devices, accelerator, nodes, count):
    assert count_devices(devices, accelerator, nodes) == count


def test_automatic_devices_are_those_of_this_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert count_devices("auto", "gpu", 1) == 3


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "batches", "plan"),
    [
        (100, None, None, StepPlan(100, 8, None)),
        (-1, 3, None, StepPlan(None, 8, None)),
        (100, None, 20, StepPlan(100, 8, 20.0)),  # 20 batches in windows of 4 are 5 steps
        (100, 2, 20, StepPlan(10, 8, 2.0)),
        (-1, 3, 21, StepPlan(18, 8, 3.0)),  # the last window is shorter
        (-1, None, 20, StepPlan(None, 8, None)),
    ],
)
def test_plan_steps(max_steps, max_epochs, batches, plan):
    assert plan_steps(8, max_steps, max_epochs, batches, accumulate=4) == plan
