"""Replay: what an eviction kept with the question is kept again before it; and the settings of the peers."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.peer_accuracy import ADAPTERS
from benchmarks.peer_methods import PEERS, peer_settings
from benchmarks.replay import marked, replayed
from subtoken_train.cache.cache import PackedCache
from subtoken_train.datasets.text_batches import TextSample, collate_text
from subtoken_train.evictions import EVICTIONS, build_eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.pool import load_backbone
from subtoken_train.inference.prefill import context_part, open_prompts
from tests.support.places import ROOT, shown

CHAINS = [
    ("knorm", {}),
    ("snapkv", {"window": 3}),
    ("ada(snapkv)", {"snapkv.window": 3}),
    ("kvzip", {"chunk": 16}),
    ("elastic", {}),
]


@pytest.fixture(scope="module")
def backbone():
    return load_backbone(ROOT / "checkpoints/tiny-llama")


@pytest.fixture(scope="module")
def prompts():
    """Contexts and questions of unlike lengths, padded on the right."""
    drawn = torch.randint(5, 1000, (3, 60), generator=torch.Generator().manual_seed(0)).tolist()
    sizes = ((40, 9), (24, 5), (31, 12))
    texts = [
        TextSample(ids[: context + asked], context, asked, f"{i}")
        for i, (ids, (context, asked)) in enumerate(zip(drawn, sizes, strict=True))
    ]
    return collate_text(texts, 0)


def opened(backbone, prompts, compression, protocol):
    return open_prompts(backbone, prompts, PackedCache(backbone.family.shape.num_layers), compression, protocol)


@pytest.mark.parametrize(("notation", "settings"), CHAINS)
@pytest.mark.parametrize("keep", [0.25, 1.0])
def test_what_was_kept_with_the_question_is_kept_before_it(backbone, prompts, notation, settings, keep):
    compression = Compression(build_eviction(notation, **settings), keep)
    aware = opened(backbone, prompts, compression, "query_aware")
    again = opened(backbone, prompts, replayed(backbone, prompts, compression), "context_first")
    context_BN, width = context_part(prompts.regions_BN), prompts.regions_BN.shape[1]
    for first, second in zip(aware.plan.layers, again.plan.layers, strict=True):
        kept = marked(first, width) & context_BN[..., None]
        own = marked(second, again.regions_BM.shape[1])
        for row in range(len(kept)):
            here = again.regions_BM[row] > 0
            heads = torch.broadcast_tensors(own[row][here], kept[row][context_BN[row]])
            assert torch.equal(*heads)
    if keep == 1:
        whole = opened(backbone, prompts, Compression(), "query_aware")
        torch.testing.assert_close(again.logits_BV, whole.logits_BV, atol=1e-4, rtol=0)


def test_a_method_that_reads_no_question_is_asked_the_same_blind(backbone, prompts):
    compression = Compression(build_eviction("knorm"), 0.25)
    blind = opened(backbone, prompts, compression, "context_first")
    again = opened(backbone, prompts, replayed(backbone, prompts, compression), "context_first")
    assert torch.equal(blind.logits_BV, again.logits_BV)


def test_what_evicts_nothing_cannot_be_replayed(backbone, prompts):
    with pytest.raises(ValueError, match="evicts nothing"):
        replayed(backbone, prompts, Compression(build_eviction("quest_steps"), 0.5))


def test_every_method_stands_among_the_peers_or_on_the_page_of_quality():
    """There in the table, or named as not measured."""
    rows = shown(ROOT / "docs/quality.md", "eviction").splitlines()
    named = {row.split(" | ")[0].removeprefix("| ") for row in rows} | set(re.findall(r"`(\w+)`", rows[-1]))
    assert set(EVICTIONS) <= {*PEERS.values(), *named}
    for task in ADAPTERS:
        assert all(build_eviction(notation, **peer_settings(task, name)) for name, notation in PEERS.items())
