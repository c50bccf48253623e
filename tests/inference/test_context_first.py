"""The context is compressed before the question is seen; where that changes nothing, nothing changes."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.batched import generate_batch, score_batch
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode, open_prompts
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress, only_sample
from tests.support.sampling import sampled
from tests.support.truth_cells import backbone_of
from tests.support.truth_models import KV_HEADS, OwnSets, family_of, prompts

CELL = {"selector": "none", "layout": "contiguous", "groups": "8/3", "budget": "per_token", "precision": "fp32"}
PLAIN = Compression()


def backbone_for(family, reducer="none", selector="none", **levels):
    return backbone_of({**CELL, "family": family, "reducer": reducer, "selector": selector, **levels})


def opened(backbone, batch, protocol, compression=PLAIN):
    cache = PackedCache(backbone.family.shape.num_layers)
    return open_prompts(backbone, batch, cache, compression, protocol), cache


@sampled("kind", ["three_left", "three_right", "text_left", "text_right"], every=8)
@sampled("family", ["llava", "llava_gqa", "qwen2_5_vl", "llama"], every=3)
@torch.no_grad()
def test_without_compression_the_protocols_are_one(family, kind):
    backbone, (kind, _, side) = backbone_for(family), kind.partition("_")
    batch = prompts(backbone.family, kind, side == "left")
    runs = [opened(backbone, batch, protocol) for protocol in ("query_aware", "context_first")]
    assert (runs[0][0].logits_BV - runs[1][0].logits_BV).abs().max() < 1e-4
    assert torch.equal(runs[0][1].next_position, runs[1][1].next_position)
    further = torch.randint(10, 60, (3, 5), generator=torch.Generator().manual_seed(1))
    for start, stop in ((0, 1), (1, 5)):  # one token, then several
        whole, first = (decode(backbone, further[:, start:stop], cache) for _, cache in runs)
        assert (whole - first).abs().max() < 1e-4
    answers = [generate_batch(backbone, batch, max_new_tokens=10, protocol=p) for p in ("query_aware", "context_first")]
    assert [x.token_ids for x in answers[0]] == [x.token_ids for x in answers[1]]


@pytest.mark.parametrize(
    ("family", "reducer", "selector"),
    [
        ("llava_gqa", "visionzip", "linear"),
        ("qwen2_5_vl", "visionzip", "value_norm"),
        ("llava", "none", "gated"),
        ("llama", "none", "mlp"),
    ],
)
@torch.no_grad()
def test_methods_that_read_no_question_do_not_notice(family, reducer, selector):
    backbone = backbone_for(family, reducer, selector)
    batch = prompts(backbone.family, "three", pad_left=False)
    runs = [opened(backbone, batch, protocol)[0] for protocol in ("query_aware", "context_first")]
    assert (runs[0].logits_BV - runs[1].logits_BV).abs().max() < 1e-4
    assert (runs[0].logits_BV - opened(backbone_for(family), batch, "query_aware")[0].logits_BV).abs().max() > 1e-3


@torch.no_grad()
def test_the_last_context_token_ranks():
    backbone = compress(family_of("llava"), RoutingConfig(num_groups=8, kept_groups=2), name="fastv", keep_ratio=0.25)
    batch, other = (prompts(backbone.family, "three", pad_left=True) for _ in range(2))
    asks = batch.regions_BN == Region.QUERY
    other.input_ids_BN[asks] = other.input_ids_BN[asks] % 40 + 11

    def kept(protocol):
        found = [generate_batch(backbone, each, max_new_tokens=1, protocol=protocol) for each in (batch, other)]
        return [[outcome.kept_visual for outcome in outcomes] for outcomes in found]

    first, aware = kept("context_first"), kept("query_aware")
    assert first[0] == first[1] != aware[0] != aware[1]


def test_prompts_without_context_are_not_compressed():
    backbone = backbone_for("llava_gqa", "fastv_embeds", "linear")
    batch = prompts(backbone.family, "text", pad_left=True)
    compression = Compression(build_eviction("h2o"), 0.25)
    got = generate_batch(backbone, batch, max_new_tokens=5, compression=compression, protocol="context_first")
    plain = generate_batch(backbone_for("llava_gqa"), only_sample(batch, 1), max_new_tokens=5)
    assert got[1].token_ids == plain[0].token_ids
    assert got[1].entries_before == got[1].region_bytes == 0
    assert got[1].dense_kv_bytes <= got[1].kv_bytes <= got[1].dense_kv_bytes + 8 * 2 * backbone.family.shape.num_layers
    assert got[0].kv_bytes < 0.5 * got[0].dense_kv_bytes


@pytest.mark.parametrize("eviction", [None, OwnSets()])
@torch.no_grad()
def test_chosen_samples_keep_their_padding(eviction):
    """Questions of unequal length are padded in the tail; samples can be reordered and repeated all the same."""
    backbone = backbone_for("llava_gqa")
    KV_HEADS[0] = backbone.family.shape.num_kv_heads
    batch, further = prompts(backbone.family, "three", pad_left=True), torch.tensor([[11, 12], [13, 14], [15, 16]])
    expected = decode(backbone, further, opened(backbone, batch, "context_first", Compression(eviction))[1])
    chosen = opened(backbone, batch, "context_first", Compression(eviction))[1]
    chosen.batch_select_indices(torch.tensor([2, 0, 2]))
    assert (decode(backbone, further[[2, 0, 2]], chosen) - expected[[2, 0, 2]]).abs().max() < 1e-4
    chosen.crop(-2)
    assert (decode(backbone, further[[2, 0, 2]], chosen) - expected[[2, 0, 2]]).abs().max() < 1e-4


REFUSED = {
    "reducer": ("llama", "quest", "none", None, "reducer 'quest' chooses by the question; use query_aware"),
    "pruner": ("llava", "cdpruner", "none", None, "reducer 'cdpruner' chooses by the question; use query_aware"),
    "routers": ("llama", "none", "query", None, "the routers are conditioned on the question"),
    "image": ("llava", "none", "none", "aircache", "'aircache' reads the attention from the question to the image"),
    "no question": ("llava", "none", "none", None, "nothing follows the context of 'sample-1'"),
    "protocol": ("llava", "none", "none", None, "unknown protocol 'protocol'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_go_first_is_refused(name):
    family, reducer, selector, eviction, words = REFUSED[name]
    backbone = backbone_for(family, reducer, selector)
    batch, protocol = prompts(backbone.family, "three", pad_left=True), "context_first"
    if name == "no question":
        batch.regions_BN[1, -1] = int(Region.VISUAL)
    compression = Compression() if eviction is None else Compression(build_eviction(eviction), 0.5)
    how = {"compression": compression, "protocol": name if name == "protocol" else protocol}
    with pytest.raises(ValueError, match=words):
        score_batch(backbone, batch, [[[1]]] * 3, **how)
