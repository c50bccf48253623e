"""A decode step reads nothing of its caches on the host, and has no shape that depends on what is stored."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from subtoken_train.inference.prefill import decode
from tests.support.host_reads import host_reads
from tests.support.packing import short_runs  # noqa: F401  (a fixture)
from tests.support.sampling import sampled
from tests.support.step_cells import CELLS, StepCell

NEW = (1, 1, 16, 3, 1)  # tokens of the steps that are watched


def begun(cell: StepCell):
    backbone, cache, token_B1 = cell.filled()
    cache.reserve(sum(NEW) + 1)
    decode(backbone, token_B1, cache)
    return backbone, cache, [token_B1.repeat(1, new) for new in NEW]


@sampled("name", CELLS, every=4)
@torch.no_grad()
def test_a_step_does_not_wait_for_the_device(name):
    backbone, cache, steps = begun(CELLS[name])
    for ids in steps:
        with host_reads() as found:
            decode(backbone, ids, cache)
        assert found == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CELLS)
@torch.no_grad()
def test_a_step_on_cuda_does_not_wait_for_it(name):
    backbone, cache, steps = begun(replace(CELLS[name], device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids in steps:
            decode(backbone, ids, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
