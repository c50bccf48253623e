"""How often the host reads the device: a prompt's pass, and steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode, prefill
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import compress
from tests.support.host_reads import host_reads
from tests.support.packing import short_runs  # noqa: F401  (a fixture)
from tests.support.sampling import sampled
from tests.support.step_cells import CELLS, StepCell
from tests.support.text_families import text_batch, text_family

OWN_SETS = build_eviction("ada(knorm)")
BATCH = [(30, 5, 0), (21, 4, 0)]


@torch.no_grad()
def reads(layers, routed=False, reducer=None, **compression):
    routing = RoutingConfig(num_groups=4, kept_groups=1) if routed else None
    backbone = compress(text_family(layers=layers), routing, **(reducer or {})).eval()
    cache, prompts = PackedCache(layers), text_batch(BATCH, pad_left=True)
    with host_reads() as found:
        prefill(backbone, prompts, cache, Compression(**compression))
    assert all(layer.blocks for layer in cache.layers)
    return [each for each in found if not each.startswith("aten::lift_fresh at families/decoder.py")]


@sampled(
    ("most", "settings"),
    [
        (6, {}),
        (16, {"routed": True}),
        (8, {"eviction": build_eviction("knorm"), "keep": 0.5, "scope": "all"}),
        (8, {"eviction": build_eviction("streaming_llm"), "keep": 0.5, "scope": "all"}),
    ],
    every=4,
)
def test_reads_do_not_grow_with_the_layers(most, settings):
    few, many = reads(2, **settings), reads(5, **settings)
    assert len(many) == len(few) <= most, many


@sampled(
    ("each", "settings"),
    [
        (2, {"key_channels": 0.5, "key_window": 4}),
        (2, {"prefill_chunk": 16}),
        (2, {"eviction": OWN_SETS, "keep": 0.5, "scope": "all"}),
    ],
    every=3,
)
def test_what_hangs_on_a_layer_is_read_in_it(each, settings):
    """Which keys are cut, a chunked prompt's layer before the next one runs, floors of heads."""
    few, many = reads(2, **settings), reads(5, **settings)
    assert len(many) - len(few) <= 3 * each, many


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
