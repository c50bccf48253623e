"""What fills a cache, what a decode step does not do, what the host reads, and what attention a GPU is asked for."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import subtoken_train
from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine import attention
from subtoken_train.evictions import EVICTIONS, build_eviction
from subtoken_train.functional import causal_attention
from subtoken_train.functional.gather import on_device
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode, prefill
from subtoken_train.routing import RoutingConfig
from tests.support import truth_cells
from tests.support.generation_cells import CELLS, StepCell
from tests.support.helpers import compress
from tests.support.packing import short_runs  # noqa: F401  (a fixture)
from tests.support.prompt_views import settings_for
from tests.support.sampling import sampled
from tests.support.shards import host_reads
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import PLAIN_CELL, backbone_of
from tests.support.truth_models import KV_HEADS, OwnSets, SharedSet, family_of, prompts

ROOMS = [str(Path(subtoken_train.__file__).parent / room) for room in ("routing", "reducers", "evictions")]
NEW = (1, 1, 16, 3, 1)  # tokens of the steps that are watched


class Spy(TorchDispatchMode):
    """Sizes of the floating-point tensors that operations make; views of what was there before are not new."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.made, self.held = known, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.held.append(tensor)  # so that no address is used twice
                if tensor.untyped_storage().data_ptr() not in self.known:
                    self.made.append((tensor.numel(), str(func)))
        return out


@pytest.mark.parametrize("eviction", [None, SharedSet(), OwnSets()])
@pytest.mark.parametrize("new", [1, 4])
@torch.no_grad()
def test_a_decode_step_runs_no_router_and_copies_no_prompt(eviction, new):
    family = text_family(layers=2)
    KV_HEADS[0] = family.shape.num_kv_heads
    backbone = compress(family, RoutingConfig(num_groups=8, kept_groups=2), name="quest", keep_ratio=0.5).eval()
    batch, cache, calls, routed = text_batch([(600, 30, 0), (500, 20, 0)]), PackedCache(2), [], []
    first = prefill(backbone, batch, cache, Compression(eviction))
    decode(backbone, torch.ones(2, 1, dtype=torch.long), cache)  # the tail's room
    for selector in backbone.bank.selectors:
        selector.register_forward_hook(lambda *_: routed.append(1))

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(tuple(ROOMS)):
            calls.append(frame.f_code.co_name)

    def stored():
        return [part.data for layer in cache.layers for block in layer.blocks for part in block.payloads]

    before = [data.data_ptr() for data in stored()]
    known = [*stored(), *(tail for layer in cache.layers for tail in (layer.keys, layer.values))]
    known += [*family.model.parameters(), *family.model.buffers()]
    spy = Spy({tensor.untyped_storage().data_ptr() for tensor in known})
    sys.setprofile(profile)
    try:
        with spy:
            decode(backbone, torch.ones(2, new, dtype=torch.long), cache)
    finally:
        sys.setprofile(None)
    assert routed == []
    assert set(calls) <= {"_hook"}  # of a bank that routes nothing
    assert [data.data_ptr() for data in stored()] == before
    layer = first.plan.layers[0]
    entries = int((layer.entries_BN >= 0).sum())
    if layer.heads_BNh is not None:
        entries = int(layer.heads_BNh.sum()) // family.shape.num_kv_heads
    assert max(spy.made)[0] < entries * family.shape.value_dim, max(spy.made)


@torch.no_grad()
def reads(layers, routed=False, reducer=None, options=None, **compression):
    """What the host waits for in a prompt's pass on a device that is not read; what stays is as on one that is."""
    routing, made = RoutingConfig(num_groups=4, kept_groups=1) if routed else None, []
    backbone = compress(text_family(layers=layers), routing, **(reducer or {})).eval()
    name, prompts = compression.pop("eviction", None), text_batch([(30, 5, 0), (21, 4, 0)], pad_left=True)
    for devices in ((), ("cpu",)):
        if name is not None:
            compression["eviction"] = build_eviction(name, **(options or {}) | settings_for(name, backbone.family))
        made.append(PackedCache(layers))
        with host_reads() as found, patch.object(causal_attention, "DEVICES", devices):
            prefill(backbone, prompts, made[-1], Compression(**compression))
    stored = [[each.data for layer in own.layers for block in layer.blocks for each in block.payloads] for own in made]
    assert stored[0]
    for plain, other in zip(*stored, strict=True):
        torch.testing.assert_close(plain, other)
    return [each for each in found if not each.startswith("aten::lift_fresh at families/decoder.py")]


READING = ("q_filter",)  # the directions of a prompt's own queries are found in fp64, on a CPU
OF_TEXT = [name for name in EVICTIONS if name not in ("aircache", "tgv_kv", "meda", *READING)]
AROUND = ["ada(snapkv)", "critical(snapkv)", "chunk(critical(knorm))", "lkv(snapkv)", "pooled(snapkv)"]
HALF = {"keep": 0.5, "scope": "all"}
READS = [
    (6, {}), (16, {"routed": True}), (9, {"eviction": "knorm", "rerotate": True} | HALF),
    (7, {"key_channels": 0.5, "key_window": 4}), (12, {"key_channels": 0.5, "key_window": 4, "key_axes": "pca"}),
    (16, {"routed": True, "prefill_chunk": 16}), (8, {"prefill_chunk": 16}),
    *((25, {"eviction": name} | HALF) for name in OF_TEXT + AROUND),
    (25, {"eviction": "ada(snapkv)", "options": {"safeguard": "blend", "normalise": True}} | HALF),
    (25, {"eviction": "lagkv", "options": {"lag": 4}} | HALF),
    (36, {"eviction": "kvzip", "options": {"chunk": 10}} | HALF),
    (12, {"eviction": "knorm", "merge": "weighted"} | HALF),
    (25, {"eviction": "knorm", "keep": 9000, "unit": "bytes", "scope": "all"}),
    *((40, {"reducer": {"name": name, "keep_ratio": 0.6}}) for name in ("quest", "compactor", "lagkv", "h2o", "kvzip")),
]  # fmt: skip


@sampled(("most", "settings"), READS, every=4)
def test_reads_do_not_grow_with_the_layers(most, settings):
    few, many = reads(3, **settings), reads(5, **settings)
    once = 2 * ("prefill_chunk" in settings or "key_axes" in settings)  # in every layer: what is packed alone, and axes
    assert len(few) + once == len(many) <= most, many


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
def test_a_step_on_cuda_does_not_wait_for_it(name):
    backbone, cache, steps = begun(replace(CELLS[name], device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ids in steps:
            decode(backbone, ids, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


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


def run(kind, batch="one_left", move=None):
    cell, compression = KINDS[kind]
    backbone = backbone_of({**PLAIN_CELL, **cell})
    name, side = batch.split("_")
    given = prompts(backbone.family, name, side == "left")
    if move is not None:
        backbone.to(*move)
        given = on_device(given, move[0])
    return prefill(backbone, given, PackedCache(backbone.family.shape.num_layers), Compression(**compression)).logits_BV


@pytest.fixture
def calls(monkeypatch):
    """Calls of the language model; a tower's see all rows and have as many key heads."""
    made, attend = [], functional.scaled_dot_product_attention

    def noted(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if attn_mask is not None or is_causal:
            half = [x.bfloat16() for x in (query, key, value)]
            size = None if attn_mask is None else tuple(attn_mask.shape)
            kernels = causal_attention.fused_kernels(*half, attn_mask is not None)
            made.append(Call(query.shape[2], key.shape[2], size, is_causal, enable_gqa, kernels))
        return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(attention, "ROW_BLOCK", BLOCK)
    monkeypatch.setattr("subtoken_train.functional.causal_attention.SHARING", ())  # as on a GPU
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
    monkeypatch.setattr(truth_cells.models, "family_of", family_of.__wrapped__)  # the shared ones stay where they are
    expected = run(kind, batch)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        found = run(kind, batch, ("cuda", dtype))
    assert found.isfinite().all()
    if dtype == torch.float32:
        torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3)
