"""Cut key channels: which entries, which bytes, and that all who count agree."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from subtoken_train import SubTokenModel
from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import build_eviction
from subtoken_train.inference import layer_packer
from subtoken_train.inference.cache_report import account, report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.layer_packer import QueryMoments
from subtoken_train.inference.prefill import prefill
from subtoken_train.ledger.kv_budget import KVBudget, basis_bytes, kept_channels
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region, in_compressed_region
from tests.support.helpers import FirstEntries, compress
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of, compression_of, from_truth
from tests.support.truth_models import KV_HEADS, OwnSets

PROMPTS = [(90, 7, 0), (60, 9, 0), (0, 8, 0)]
ROUTING = RoutingConfig(num_groups=16, kept_groups=4)


def filled(compression, routing=None, prompts=PROMPTS, **shape):
    family = text_family(**shape)
    KV_HEADS[0] = family.shape.num_kv_heads
    backbone, batch = compress(family, routing), text_batch(prompts)
    cache = PackedCache(family.shape.num_layers)
    return backbone, batch, prefill(backbone, batch, cache, compression), cache


@pytest.mark.parametrize("axes", ["own", "pca"])
@pytest.mark.parametrize("scope", [None, "all"])
def test_keys_in_scope_are_cut_but_for_the_last_rows(scope, axes):
    eviction = None if scope is None else FirstEntries()
    keep = 1.0 if scope is None else 0.5
    _, batch, first, _ = filled(Compression(eviction, keep, scope=scope, key_channels=0.6, key_axes=axes))
    for plan in first.plan.layers:
        for sample, padded in enumerate(plan.entries_BN):
            entries = padded[padded >= 0]
            real = (batch.regions_BN[sample] != Region.PADDING).nonzero()[:, 0]
            in_scope = in_compressed_region(batch.regions_BN[sample])[entries] | (scope == "all")
            expected = in_scope & ~torch.isin(entries, real[-32:])
            if axes == "pca":
                expected &= entries != real[0]  # all tokens look at it
            assert plan.cut_keys.entries_BN[sample, : len(entries)].tolist() == expected.tolist()
        assert not plan.cut_keys.entries_BN[plan.entries_BN < 0].any()
        assert (plan.cut_keys.channels_Bhd.sum(-1) == kept_channels(16, 0.6)).all()


@pytest.mark.parametrize("routing", [None, ROUTING])
@pytest.mark.parametrize("method", [None, "shared", "own"])
@pytest.mark.parametrize("kv_dtype", ["model", "int8", "int4"])
@pytest.mark.parametrize("axes", ["own", "pca"])
@torch.no_grad()
def test_ledger_report_and_shares_are_the_stored_bytes(routing, method, kv_dtype, axes):
    eviction = {None: None, "shared": FirstEntries(), "own": OwnSets()}[method]
    keep = 1.0 if eviction is None else 0.5
    compression = Compression(eviction, keep, kv_dtype=kv_dtype, key_channels=0.6, key_axes=axes)
    backbone, batch, first, cache = filled(compression, routing)
    told = report(backbone, batch, first.plan, cache, compression)
    shares = account(backbone, batch, first, cache)
    assert sum(share.kv_bytes for share in shares) == told.payload_bytes + told.index_bytes
    whole = filled(Compression(eviction, keep, kv_dtype=kv_dtype), routing)
    before = account(whole[0], batch, whole[2], whole[3])
    shape = backbone.family.shape
    basis = shape.num_layers * basis_bytes(shape, KVBudget(key_channels=0.6, key_axes=axes))
    assert basis * len(shares) == sum(layer.basis_bytes for layer in cache.layers)
    for share, other in zip(shares, before, strict=True):
        saved = other.kv_bytes - share.kv_bytes
        assert saved == other.region_bytes - share.region_bytes
        saved += basis
        assert (saved + share.index_bytes - other.index_bytes > 0) == (share.entries_before > 0)
    if kv_dtype == "model":
        assert told.payload_bytes == told.ledger.bytes_of(with_index=False)
        for share, other in zip(shares, before, strict=True):
            saved_keys = (other.keys_after - share.keys_after) * backbone.family.shape.side_bytes
            index = share.index_bytes - other.index_bytes
            assert saved_keys == pytest.approx(other.region_bytes - share.region_bytes + index + basis)
    if routing is None and method != "own":
        rows = sum(block.rows.nbytes for x in cache.layers for block in x.blocks if block.rows is not None)
        assert told.index_bytes - rows == sum(entry.index_bytes for entry in told.ledger.entries)


@pytest.mark.parametrize("axes", ["own", "pca"])
def test_where_no_key_is_cut_nothing_is_stored_for_it(axes, tmp_path):
    """Without a context, with one that the last rows hold, or where all channels stay; such a cache is read back."""
    cut = Compression(key_channels=0.5, key_axes=axes)
    *_, first, cache = filled(replace(cut, key_channels=0.99))
    assert all(layer.basis is None and block.channels is None for layer in cache.layers for block in layer.blocks)
    assert all(plan.cut_keys is None for plan in first.plan.layers)
    for prompts in ([(0, 8, 0)], [(20, 0, 0)]):
        backbone, _, first, cache = filled(cut, prompts=prompts)
        *_, whole, plain = filled(Compression(), prompts=prompts)
        assert [layer.basis for layer in cache.layers] == [None] * len(cache.layers)
        assert torch.equal(first.logits_BV, whole.logits_BV)
        assert [layer.payload_bytes for layer in cache.layers] == [layer.payload_bytes for layer in plain.layers]
    model, read = SubTokenModel.around(backbone, cut), SubTokenModel.around(backbone, cut)
    answers = model.ask("the lamp is red .", ["which ?"], max_new_tokens=2)
    read.load_cache(str(model.cache.save(tmp_path / "kept")))
    assert read.ask(None, ["which ?"], max_new_tokens=2) == answers


@pytest.mark.parametrize("axes", ["own", "pca"])
@pytest.mark.parametrize("routing", [None, ROUTING])
@pytest.mark.parametrize("name", ["streaming_llm", "snapkv"])
def test_budgets_in_bytes_are_kept_and_used(routing, name, axes):
    budget, cut = 100_000, {"key_channels": 0.6, "key_axes": axes}
    for more in ({}, cut):
        compression = Compression(build_eviction(name), budget, "bytes", **more)
        backbone, batch, first, cache = filled(compression, routing, [(500, 40, 0)])
        (kept,), shape = account(backbone, batch, first, cache), backbone.family.shape
        index = kept.index_bytes - bool(more) * shape.num_layers * shape.num_kv_heads * kept_channels(16, 0.6)
        assert budget - shape.num_layers * 2 * shape.side_bytes < kept.kv_bytes - index <= budget


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
