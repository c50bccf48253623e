"""Cut key channels, closed-up positions: entries, bytes, turned keys. B batch, h key-value heads, N rows, d width."""

import inspect
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from subtoken_train import SubTokenModel
from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import build_eviction
from subtoken_train.families.decoder import CACHE
from subtoken_train.inference import layer_packer
from subtoken_train.inference.cache_report import account, report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.layer_packer import QueryMoments, Rerotation
from subtoken_train.inference.prefill import prefill
from subtoken_train.ledger.kv_budget import KVBudget, basis_bytes, kept_channels
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region, in_compressed_region
from tests.support.golden_cases import golden_view, keep_of, load, record
from tests.support.helpers import FirstEntries, compress
from tests.support.prompt_views import rope
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of, compression_of, difference, from_truth
from tests.support.truth_models import KV_HEADS, OwnSets

PROMPTS = [(90, 7, 0), (60, 9, 0), (0, 8, 0)]
ROUTING = RoutingConfig(num_groups=16, kept_groups=4)
CELL = {"layout": "contiguous", "groups": "8/3", "budget": "per_token", "precision": "fp32", "rerotate": "yes"}


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
def test_ledger_report_and_shares_are_the_stored_bytes(routing, method, kv_dtype, axes):
    eviction = {None: None, "shared": FirstEntries(), "own": OwnSets()}[method]
    given = {"eviction": eviction, "keep": 1.0 if eviction is None else 0.5, "kv_dtype": kv_dtype}
    compression = Compression(**given, key_channels=0.6, key_axes=axes)
    backbone, batch, first, cache = filled(compression, routing)
    told, shares = report(backbone, batch, first.plan, cache, compression), account(backbone, batch, first, cache)
    assert sum(share.kv_bytes for share in shares) == told.payload_bytes + told.index_bytes
    whole, _, plain, held = filled(Compression(**given), routing)
    shape, others = backbone.family.shape, account(whole, batch, plain, held)
    basis = shape.num_layers * basis_bytes(shape, KVBudget(key_channels=0.6, key_axes=axes))
    assert basis * len(shares) == sum(layer.basis_bytes for layer in cache.layers)
    for share, other in zip(shares, others, strict=True):
        saved, index = other.kv_bytes - share.kv_bytes, share.index_bytes - other.index_bytes
        assert saved == other.region_bytes - share.region_bytes
        assert (saved + basis + index > 0) == (share.entries_before > 0)
        if kv_dtype == "model":
            assert (other.keys_after - share.keys_after) * shape.side_bytes == pytest.approx(saved + index + basis)
    assert kv_dtype != "model" or told.payload_bytes == told.ledger.bytes_of(with_index=False)
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
    for part in (slice(7), slice(7, None)):  # rows that one budget chooses among, and those after them
        rows = SimpleNamespace(regions_BM=regions[:, part])
        moments.observe(5, query[:, :, part], key[:, :, part], key[:, :, part], 1.0, rows)
    for sample, first in ((0, 0), (1, 4)):
        own = query[sample, :, first:].reshape(3, -1, 8)
        assert torch.allclose(moments.of[5][sample], own.mT @ own, atol=1e-5 * own.shape[1])


@pytest.mark.parametrize("more", [{"chunk": 16, "eviction": "h2o"}, {"rerotate": "yes", "eviction": "streaming_llm"}])
def test_keys_are_rounded_in_chunks_and_after_rerotation(more):
    cell = PLAIN_CELL | {"scope": "context", "batch": "three_left", "protocol": "query_aware", "merge": "own"} | more
    cell |= {"precision": "int4_rotated"}
    found = from_truth(backbone_of(cell), batch_of(cell), 4, compression_of(cell))
    assert found.fits("int4_rotated"), found


def by_hand(vector_d, position, inv_freq):
    half, out = len(vector_d) // 2, vector_d.clone()
    for i, angle in enumerate((position * inv_freq).tolist()):
        cos, sin = torch.tensor(angle).cos(), torch.tensor(angle).sin()
        x, y = vector_d[i], vector_d[i + half]
        out[i], out[i + half] = x * cos - y * sin, y * cos + x * sin
    return out


@pytest.mark.parametrize("kind", ["llama", "phi3", "glm4", "cohere", "cohere2", "smollm3"])
def test_kept_keys_are_those_of_transformers_at_their_new_places(kind, monkeypatch):
    """Every form of rotation, by the model's own function: its unturned keys turned at the places they go to."""
    family, batch = text_family(kind), text_batch([(20, 4, 0), (11, 3, 0)])
    module, layers = inspect.getmodule(type(family.decoder.layers[0].self_attn)), family.decoder.layers
    own, plain, current = module.apply_rotary_pos_emb, {}, []

    def noted(query, key, *angles, **options):
        plain[current[-1]] = key
        return own(query, key, *angles, **options)

    for layer in layers:
        layer.self_attn.register_forward_pre_hook(lambda each, _: current.append(each.layer_idx))
    cache, position = family.dense_cache(), family.positions(batch)
    given = {"attention_mask": (batch.regions_BN != 0).long(), "position_ids": position, CACHE: cache}
    with monkeypatch.context() as patch:
        patch.setattr(module, "apply_rotary_pos_emb", noted)
        family.model(batch.input_ids_BN, **given)
    keep = torch.rand(2, 2, 25, generator=torch.Generator().manual_seed(1)).topk(7).indices
    keep = torch.zeros(2, 2, 25, dtype=torch.bool).scatter(2, keep, True)
    rerotation, places = Rerotation(family.rotation), (keep.cumsum(-1) - 1).clamp(min=0)
    for layer in range(3):
        found = rerotation.closed_up(layer, cache.layers[layer].keys, keep, position)
        for head in range(2):
            expected = cache.layers[layer].keys[:, head]
            if layer in plain:
                one = plain[layer][:, head : head + 1]
                expected = own(one, one, *family.decoder.rotary_emb(one, places[:, head]))[1][:, 0]
            torch.testing.assert_close(found[:, head][keep[:, head]], expected[keep[:, head]], rtol=1e-4, atol=1e-4)
    assert len(plain) == {"cohere2": 2, "smollm3": 2}.get(kind, 3)


@pytest.mark.parametrize("call", ["call", "evict_for_space"])
def test_golden_streaming_llm(shared, call):
    """The release caches unrotated keys and turns them by their place in the cache: the same keys, in the end."""
    params, tensors = load(shared, "streamingllm_original")
    places = tensors[f"kept_positions_{call}" + ("" if call == "call" else f"_{params['num_coming']}")]
    method = build_eviction("streaming_llm", sinks=params["start_size"])
    keep_BhN = keep_of(method, [golden_view(method, tensors)], places.shape[-1])[0]
    cached, position = tensors["keys"], torch.arange(params["T"]).expand(params["B"], -1)
    inv_freq = 10000.0 ** (-torch.arange(0, params["D"], 2) / params["D"])
    rotate = partial(rope, width=params["D"], theta=10000.0)
    rerotation = Rerotation(lambda _, position_BN: rotate(position_BN))
    ours = rerotation.closed_up(0, rotate(position).turn(cached), keep_BhN, position)
    assert (rerotation.next_position(position.device) == places.shape[-1]).all()
    worst = 0.0
    for sample, head in product(range(len(cached)), range(cached.shape[1])):
        for rank, place in enumerate(places[sample, head].tolist()):
            expected = by_hand(cached[sample, head, place], rank, inv_freq)
            worst = max(worst, float((ours[sample, head, place] - expected).abs().max()))
    record("streaming_llm", f"streamingllm_original {call}: keys as the release turns them", worst)
    assert worst < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
@sampled(
    ("family", "reducer", "selector", "eviction", "protocol", "chunk"),
    [
        ("llama", "none", "none", "streaming_llm", "query_aware", None),
        ("llama", "none", "linear", "snapkv", "context_first", None),
        ("qwen2", "quest", "mlp", "h2o", "query_aware", None),
        ("mistral", "none", "none", "knorm", "context_first", 9),
        ("cohere", "none", "linear", "snapkv", "context_first", None),
        ("glm4", "none", "none", "h2o", "query_aware", 9),
        ("llava_gqa", "none", "none", "random", "context_first", None),
        ("llava_gqa", "fastv_embeds", "linear", "h2o", "query_aware", 11),
        ("llava", "visionzip", "gated", "streaming_llm", "context_first", 7),
    ],
    every=3,
)
@pytest.mark.parametrize("scope", ["context", "all"])
def test_the_packed_cache_is_the_recompute(family, reducer, selector, eviction, protocol, chunk, scope, side):
    cell = {"family": family, "reducer": reducer, "selector": selector, "eviction": eviction, "protocol": protocol}
    found = difference({**CELL, **cell, "batch": f"three_{side}", "scope": scope, "chunk": chunk}, 8)
    assert found.fits("fp32"), found


@pytest.mark.parametrize(
    ("family", "reducer", "eviction", "words"),
    [
        ("qwen2_5_vl", "none", "knorm", "the image grids of qwen2_5_vl: a grid has gaps that cannot be closed"),
        ("llava_gqa", "fastv_decoder", "knorm", r"keep between \d+ and \d+ entries of a prompt, but what follows"),
        ("llama", "none", "shared_set", r"heads or layers keep between 1\d and 2\d entries"),
        ("llava_gqa", "none", "own_sets", r"keep between \d+ and \d+ entries of a prompt, but what follows needs one"),
    ],
)
def test_what_cannot_be_closed_up_is_refused(family, reducer, eviction, words):
    cell = {"family": family, "reducer": reducer, "selector": "none", "eviction": eviction, "scope": "context"}
    refuses(words, difference, {**CELL, **cell, "batch": "three_left", "protocol": "query_aware"}, 1)
