"""What a prompt's pass of every kind asks torch's attention for: on a GPU nothing that only a matrix could answer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine import attention
from subtoken_train.evictions import build_eviction
from subtoken_train.functional.causal_attention import fused_kernels
from subtoken_train.functional.moving import on_device
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import prefill
from tests.support import truth_cells
from tests.support.truth_cells import PLAIN_CELL, backbone_of
from tests.support.truth_models import family_of, prompts

BLOCK = 8  # rows of a mask; every prompt has more
KINDS = {
    "plain": ({"family": "qwen2"}, {}),
    "routed": ({"family": "qwen2", "selector": "linear"}, {}),
    "fastv": ({"family": "llava_gqa", "reducer": "fastv_decoder"}, {}),
    "scout": ({"family": "llava_gqa", "reducer": "fastv_embeds"}, {}),
    "visionzip": ({"family": "llava_gqa", "reducer": "visionzip"}, {}),
    "quest": ({"family": "qwen2", "reducer": "quest", "selector": "linear"}, {}),
    "windows": ({"family": "qwen2_window"}, {}),
    "windows, split": ({"family": "qwen2_window", "selector": "linear"}, {}),
    "chunks": ({"family": "qwen2"}, {"prefill_chunk": 16}),
    "chunks, scout": ({"family": "llava_gqa", "reducer": "fastv_embeds"}, {"prefill_chunk": 16}),
    "chunks, windows": ({"family": "qwen2_window"}, {"prefill_chunk": 16}),
    "second pass": ({"family": "qwen2"}, {"eviction": build_eviction("kvzip"), "keep": 0.5}),
}
"""Cell of the matrix, and how it is compressed. All models share key heads between query heads."""
UNMASKED = ("plain", "fastv", "scout", "visionzip")  # and "routed", whose late rows a GPU gives no mask either


@dataclass(frozen=True)
class Call:
    """One of ``scaled_dot_product_attention``: sizes, and which kernels take it in half precision."""

    rows: int
    columns: int
    mask: tuple[int, ...] | None
    causal: bool
    shared: bool
    kernels: tuple[str, ...]


@torch.no_grad()
def run(kind, batch="one_left", move=None):
    cell, compression = KINDS[kind]
    backbone = backbone_of({**PLAIN_CELL, **cell})
    name, side = batch.split("_")
    given = prompts(backbone.family, name, side == "left")
    if move is not None:
        backbone.to(*move)
        given = on_device(given, move[0])
    cache = PackedCache(backbone.family.shape.num_layers)
    return prefill(backbone, given, cache, Compression(**compression)).logits_BV


@pytest.fixture
def calls(monkeypatch):
    """Calls of the language model; a tower's see all rows and have as many key heads."""
    made, attend = [], functional.scaled_dot_product_attention

    def noted(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if attn_mask is not None or is_causal:
            half = [x.bfloat16() for x in (query, key, value)]
            size = None if attn_mask is None else tuple(attn_mask.shape)
            kernels = fused_kernels(*half, attn_mask is not None)
            made.append(Call(query.shape[2], key.shape[2], size, is_causal, enable_gqa, kernels))
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(attention, "ROW_BLOCK", BLOCK)
    return made


@pytest.mark.parametrize("batch", ["one_left", "three_left", "three_right"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_kernel_takes_every_call(calls, kind, batch):
    run(kind, batch)
    assert calls
    assert all(call.kernels for call in calls)
    assert not any(call.mask is not None and call.shared for call in calls)


@pytest.mark.parametrize("kind", KINDS)
def test_without_padding_no_mask_is_of_all_rows(calls, kind):
    run(kind)
    assert any(call.rows > BLOCK or call.mask for call in calls)
    assert all(call.mask is None or call.mask[-2] <= BLOCK for call in calls)
    if kind in UNMASKED:
        assert all(call.mask is None and call.causal for call in calls)
    if kind == "quest":  # of the context no row has a mask, and the question's have small ones
        assert all(call.mask is not None or call.rows == call.columns for call in calls)
        assert sum(call.mask is None for call in calls) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("batch", ["one_left", "three_left"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_it_runs_on_a_gpu_without_the_matrix(monkeypatch, kind, dtype, batch):
    monkeypatch.setattr(truth_cells, "family_of", family_of.__wrapped__)  # the shared ones stay where they are
    expected = run(kind, batch)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        found = run(kind, batch, ("cuda", dtype))
    assert found.isfinite().all()
    if dtype == torch.float32:
        torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3)
