"""``merge_dropped``: of n kept tokens the last is the mean of itself and of all that are dropped; the bytes are n's.

Legend: B batch, N positions, D model width.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import keep_ranked
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support import truth_cells
from tests.support.helpers import compress, make_batch, random_mask, random_scores, sharpen
from tests.support.sampling import sampled
from tests.support.truth_cells import backbone_of, difference

PROMPTS = [(1, 9), (2, 7), (0, 12)]


def merged_by_loop(scores, regions, read, count):
    """One sample: rows of the whole tokens in the order of their rank, the merged row (or None), and who joins it."""
    visual = [n for n, code in enumerate(regions) if code == Region.VISUAL]
    order = sorted(visual, key=lambda n: (-scores[n], n))
    needed = [n for n in order if read[n]]
    count = min(len(visual), max(count, len(needed)))
    first = set(needed + [n for n in order if not read[n]][: count - len(needed)])
    kept = [n for n in order if n in first]
    free = [n for n in kept if not read[n]]
    if len(kept) == len(visual) or not free:
        return kept, None, []
    slot = free[-1]
    return [n for n in kept if n != slot], slot, [slot, *(n for n in visual if n not in first)]


@settings(max_examples=80, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 14)),
    count=st.integers(0, 15),
    levels=st.sampled_from([None, 2]),
    share=st.sampled_from([0.0, 0.2, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_who_joins_equals_a_plain_loop(shape, count, levels, share, dtype, seed):
    """Ties, padding anywhere, samples without visual tokens, rows that are read from, and counts from none to all."""
    regions = random_scores(seed, *shape, levels=len(Region), dtype=torch.int64)
    regions = torch.where(random_scores(seed + 1, *shape) > 0, Region.VISUAL, regions)
    scores = random_scores(seed + 2, *shape, levels=levels).to(dtype)
    read = random_mask(seed + 3, *shape, share=share)
    given_ = (scores, regions, read, torch.full(shape[:1], count))
    keep, rank, joins = keep_ranked(*given_, ranks=True, merges=True)
    plain, plain_rank, nothing = keep_ranked(*given_, ranks=True)
    assert nothing is None
    assert torch.equal(keep, plain)
    for sample in range(shape[0]):
        own = (part[sample].tolist() for part in (scores, regions, read))
        whole, slot, members = merged_by_loop(*own, count)
        expected = list(range(shape[1]))
        for row in members:
            expected[row] = slot
        assert joins[sample].tolist() == expected
        order = whole if slot is None else [*whole, slot]
        assert [int(rank[sample, n]) for n in order] == list(range(len(order)))
        if slot is None:
            assert rank[sample, order].tolist() == plain_rank[sample, order].tolist()


@torch.no_grad()
def plain_reduced(family, reducer, batch, sample):
    """The input embeddings that a sample should run with, by a loop over its rows."""

    def kept_rows(ratio):
        rows = CompressedBackbone(family, replace(reducer, keep_ratio=ratio, merge_dropped=False)).run(batch).rows
        return rows.index_BM[sample, rows.visible_BM[sample]].tolist()

    kept, embeds = kept_rows(reducer.keep_ratio), family.embed(batch)[sample]
    visual = (batch.regions_BN[sample] == Region.VISUAL).nonzero()[:, 0].tolist()
    dropped = [row for row in visual if row not in kept]
    best = kept_rows((len(visual) - len(dropped) - 1) / len(visual)) if dropped else kept
    return torch.stack([embeds[row] if row in best else embeds[[row, *dropped]].mean(0) for row in kept])


@sampled("pad_left", [False, True], every=2)
def test_layer_0_sees_the_mean_of_what_was_dropped(tiny_family, pad_left):
    """One image, two of one sample, and none; the ranking is that of the plain reducer with one token fewer."""
    sharpen(tiny_family)
    batch = make_batch(PROMPTS, pad_left)
    backbone = compress(tiny_family, name="fastv", keep_ratio=0.25, merge_dropped=True)
    seen = []
    handle = tiny_family.decoder.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    rows = backbone.run(batch, pad_left=pad_left).rows
    handle.remove()
    plain = compress(tiny_family, name="fastv", keep_ratio=0.25).run(batch, pad_left=pad_left).rows
    assert torch.equal(rows.index_BM, plain.index_BM)
    assert torch.equal(rows.position, plain.position)
    for sample in range(3):
        got = seen[-1][sample, rows.visible_BM[sample]]
        expected = plain_reduced(tiny_family, backbone.reducer, batch, sample)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
        changed = (got != tiny_family.embed(batch)[sample, rows.index_BM[sample, rows.visible_BM[sample]]]).any(-1)
        assert int(changed.sum()) == (0 if sample == 2 else 1)


@pytest.mark.parametrize("stage", ["embeds", "decoder"])
def test_where_nothing_is_dropped_nothing_changes(tiny_family, stage):
    """Not a bit: at a keep ratio of 1, with everything gathered, and in a batch of text."""
    with torch.no_grad():
        for batch, ratio, forced in ((make_batch(PROMPTS), 1.0, True), (make_batch([(0, 12), (0, 5)]), 0.25, False)):
            made = [
                compress(tiny_family, name="fastv", keep_ratio=ratio, stage=stage, merge_dropped=merged)
                .run(batch, force_gather=forced)
                .hidden_BMD
                for merged in (False, True)
            ]
            assert torch.equal(*made)


@pytest.mark.parametrize("stage", ["embeds", "decoder"])
def test_routers_and_embeddings_get_their_gradients(tiny_family, stage):
    """Through the mean as well, should anything train the embeddings."""
    routing = RoutingConfig(num_groups=16, kept_groups=4, budget="ranked")
    settings_ = {"name": "fastv", "keep_ratio": 0.25, "layer": 1, "stage": stage, "merge_dropped": True}
    backbone = compress(tiny_family, routing, **settings_).train()
    batch, embed = make_batch(PROMPTS), tiny_family.embed
    leaf = embed(batch).detach().requires_grad_()
    tiny_family.embed = lambda batch, states=None: leaf
    backbone.logits(backbone.run(batch)).float().pow(2).mean().backward()
    cut = backbone.cut_layer
    routers = [p for layer, bank in enumerate(backbone.bank.selectors) if layer >= cut for p in bank.parameters()]
    assert routers
    assert all(p.grad is not None and p.grad.isfinite().all() for p in routers)
    visual = batch.regions_BN == Region.VISUAL
    assert leaf.grad.isfinite().all()
    assert (leaf.grad[visual].abs().sum(-1) > 0).all()  # dropped ones too


def test_its_bytes_are_those_of_whole_tokens():
    plain, merged = (build_reducer("fastv", 0.15625, True, merge_dropped=merged) for merged in (False, True))
    assert merged.layer_tokens(64, 6) == plain.layer_tokens(64, 6) == [10] * 6
    assert merged.words == "stage embeds, L_f=2, one token of them the mean of what is dropped"


CELLS = [
    ("llava", "linear", "ranked", "snapkv", "three_left", "query_aware"),
    ("qwen3_vl", "none", "per_token", "none", "last_right", "query_aware"),
    ("qwen2_5_vl", "gated", "per_token", "h2o", "text_left", "query_aware"),
    ("llava_gqa", "mlp", "global", "none", "three_right", "context_first"),
]


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_a_cut_between_layers_merges_what_the_truth_merges(monkeypatch, cell):
    """The stage ``decoder``; that of ``embeds`` is a level of the matrix of packed = truth."""
    decoder = {"name": "fastv", "keep_ratio": 0.5, "stage": "decoder", "layer": 1, "merge_dropped": True}
    monkeypatch.setitem(truth_cells.REDUCERS, "fastv_merged", decoder)
    names = ("family", "selector", "budget", "eviction", "batch", "protocol")
    fixed = {"reducer": "fastv_merged", "layout": "contiguous", "groups": "8/3", "precision": "fp32"}
    cell = {**fixed, **dict(zip(names, cell, strict=True)), "scope": "context"}
    assert backbone_of(cell).reducer.stage == "decoder"
    found = difference(cell, 4)
    assert found.fits("fp32"), found


def test_a_cache_is_reconstructed_from_what_ran():
    """KVzip repeats the context's kept rows, the merged one as it ran; Qwen3-VL's adds features of its own to them."""
    for family in ("llava", "qwen3_vl"):
        cell = {"family": family, "reducer": "fastv_merged", "selector": "none", "layout": "contiguous"}
        cell |= {"groups": "16/4", "budget": "per_token", "eviction": "kvzip", "scope": "context"}
        found = difference(cell | {"batch": "three_left", "protocol": "query_aware", "precision": "fp32"}, 4)
        assert found.fits("fp32"), found
