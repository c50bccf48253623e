"""A decode step reads nothing of its caches on the host, and has no shape that depends on what is stored."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.inference.prefill import decode
from tests.support.host_reads import host_reads
from tests.support.step_cells import CELLS


@pytest.mark.parametrize("name", CELLS)
@torch.no_grad()
def test_a_step_does_not_wait_for_the_device(name):
    """Single tokens, and several at once, after one that may compute what all later ones need."""
    backbone, cache, token_B1 = CELLS[name].filled()
    decode(backbone, token_B1, cache)
    for new in (1, 1, 16, 3, 1):
        ids = token_B1.repeat(1, new)
        with host_reads() as found:
            decode(backbone, ids, cache)
        assert found == []
