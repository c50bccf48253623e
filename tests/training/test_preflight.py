"""Pre-flight computations that do not show in ``check`` on the shipped recipes."""

import pytest
import torch
from torch import Tensor

from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.ledger.kv_budget import KVBudget, KVShape
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.training.module import StepRecord
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


WHOLE = ((1, 2, 2, 2, 4), (1, 2, 4, 0, 0))
CUT = ((1, 2, 4), (1, 2, 4))
BARE = ((1, 4), (1, 4))


def rows(codes) -> Rows:
    regions = torch.tensor(codes)
    return Rows.whole(regions, regions)


def record(*spans, codes=WHOLE, kept: dict[int, Tensor] | None = None) -> StepRecord:
    """Two samples with 3 and 1 visual tokens; each span is (first layer, last layer + 1, its rows)."""
    found = [(start, stop, rows(of_span)) for start, stop, of_span in spans]
    return StepRecord(torch.tensor(codes), found[-1][2], found, None, kept or {})


@pytest.mark.parametrize(
    ("spans", "before", "after"),
    [
        ([(0, 2, WHOLE)], 8, 8),
        ([(0, 2, CUT)], 8, 4),
        ([(0, 1, WHOLE), (1, 4, CUT)], 16, 4 + 3 * 2),
        ([(0, 2, BARE)], 8, 0),
    ],
    ids=["everything", "before layer 0", "between layers", "nothing left"],
)
def test_entries_are_summed_over_layers(spans, before, after):
    assert tuple(map(int, record(*spans).compressed())) == (before, after)


def test_a_contexts_entries_are_those_that_later_rows_see():
    codes = ((3, 3, 3, 3, 4),)
    kept = {layer: torch.tensor([[layer == 0, False, True, False, False]]) for layer in range(2)}
    found = record((0, 2, codes), codes=codes, kept=kept)
    region = int(record((0, 2, codes), codes=codes).compressed()[0])
    assert tuple(map(int, found.compressed())) == (region, 3)
    assert region == 8
