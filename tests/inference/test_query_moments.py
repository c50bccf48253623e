"""What a prompt's queries are like, noted for the rounding of keys."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from subtoken_train.inference import layer_packer
from subtoken_train.inference.layer_packer import QueryMoments
from subtoken_train.types import Region
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of, compression_of, from_truth


@pytest.mark.parametrize("block", [4, 100])
def test_moments_are_those_of_a_heads_visible_queries(block, monkeypatch):
    monkeypatch.setattr(layer_packer, "BLOCK", block)
    draw = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 6, 11, 8, generator=draw), torch.randn(2, 3, 11, 8, generator=draw)
    regions = torch.full((2, 11), int(Region.CONTEXT))
    regions[1, :4] = int(Region.PADDING)
    moments = QueryMoments()
    moments.observe(5, query, key, key, 1.0, SimpleNamespace(regions_BM=regions))
    for sample, first in ((0, 0), (1, 4)):
        own = query[sample, :, first:].reshape(3, -1, 8)
        assert torch.allclose(moments.of[5][sample], own.mT @ own / own.shape[1], atol=1e-5)


@pytest.mark.parametrize("more", [{"chunk": 16, "eviction": "h2o"}, {"rerotate": "yes", "eviction": "streaming_llm"}])
@torch.no_grad()
def test_keys_are_rounded_in_chunks_and_after_rerotation(more):
    cell = PLAIN_CELL | {"scope": "context", "batch": "three_left", "protocol": "query_aware", "merge": "own"} | more
    cell |= {"precision": "int4_rotated"}
    found = from_truth(backbone_of(cell), batch_of(cell), 4, compression_of(cell))
    assert found.fits("int4_rotated"), found
