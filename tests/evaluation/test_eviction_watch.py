"""What generated tokens read of a whole cache: equal to eager attention without one, padding, protocols, ends."""

import pytest
import torch

from subtoken_train.evaluation.eviction_diagnosis import THRESHOLD, watch_generation, watched
from subtoken_train.evictions import EVICTIONS, build_eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.types import Region
from tests.support.helpers import compress
from tests.support.prompt_views import PROMPTS, layer_views, plan
from tests.support.text_families import text_batch, text_family

PROMPT_SIZES = [(24, 6, 0), (15, 3, 0)]
STEPS = 5


def eager_reads(batch, sample, end):
    """One sample alone without a cache: attention of generated rows to its prompt, [L, H, n], and sparsity counts."""
    model = text_family().model
    model.set_attn_implementation("eager")
    ids = batch.input_ids_BN[sample][batch.regions_BN[sample] != Region.PADDING]
    length = len(ids)
    for _ in range(STEPS):
        token = model(ids[None]).logits[0, -1].argmax()
        if int(token) == end:
            break
        ids = torch.cat([ids, token[None]])
    layers = torch.stack(model(ids[None], output_attentions=True).attentions)[:, 0]
    rows = [layers[:, :, row, : row + 1] for row in range(length, len(ids))]
    passed = sum((row >= THRESHOLD * row.amax(-1, keepdim=True)).sum((1, 2)) for row in rows)
    seen = sum(row.shape[-1] * row.shape[1] for row in rows)
    return sum(row[..., :length] for row in rows), passed, seen


@pytest.mark.parametrize("pad_left", [True, False])
@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
@torch.no_grad()
def test_reads_are_those_of_eager_attention(pad_left, protocol):
    family, batch = text_family(), text_batch(PROMPT_SIZES, pad_left)
    compression = Compression(build_eviction("snapkv", window=4), 0.5)
    layers = watch_generation(compress(family).eval(), batch, compression, protocol, STEPS)
    for sample in range(2):
        reads, passed, seen = eager_reads(batch, sample, family.tokenizer.eos_token_id)
        assert seen > 0
        for layer, watched_entries in enumerate(layers):
            entries = watched_entries.entries_BN[sample]
            found = watched_entries.mass_BHN[sample][:, entries]
            if protocol == "context_first":  # the question is no part of what was compressed
                assert int(entries.sum()) == 1 + PROMPT_SIZES[sample][0]
            assert torch.allclose(found, reads[layer][:, : int(entries.sum())], atol=1e-4)
            assert not watched_entries.mass_BHN[sample][:, ~entries].any()
            assert int(watched_entries.passed_B[sample]) == int(passed[layer])
            assert int(watched_entries.seen_B[sample]) == seen


def test_a_sample_that_ends_is_read_no_further(monkeypatch):
    """Its neighbour goes on; a token that would end the text counts for nothing."""
    family, batch = text_family(), text_batch(PROMPT_SIZES, True)
    compression = Compression(build_eviction("knorm"), 0.5)
    whole = watch_generation(compress(family).eval(), batch, compression, "query_aware", STEPS)
    model = text_family().model
    first = model(batch.input_ids_BN[:1]).logits[0, -1].argmax()
    monkeypatch.setattr(type(family.tokenizer), "eos_token_id", int(first), raising=False)
    ended = watch_generation(compress(family).eval(), batch, compression, "query_aware", STEPS)
    assert [int(each.seen_B[0]) for each in ended] == [0] * len(ended)
    assert not ended[0].mass_BHN[0].any()
    assert int(ended[0].seen_B[1]) > 0
    assert int(whole[0].seen_B[0]) > 0


@pytest.mark.parametrize("name", [*EVICTIONS, "ada(snapkv)"])
def test_a_watched_method_scores_and_plans_as_it_does(name):
    prompts = [PROMPTS["text before and after"], PROMPTS["two images"]]
    method, layers = build_eviction(name), []
    other = watched(method, layers)
    assert type(other) is not type(method)
    assert other.name == method.name
    views = layer_views(prompts, other.needs, "left")
    scores, counts, kept, candidates = plan(method, views, 0.4)
    _, counts_1, everything, _ = plan(other, views, 0.4)
    assert torch.equal(counts, counts_1)
    for layer, found in enumerate(layers):
        assert torch.equal(found.scores_BhN, scores[layer].scores_BhN)
        assert torch.equal(found.kept_BhN, kept[layer] & candidates.competes_LBN[layer][:, None])
        assert torch.equal(everything[layer][:, 0], views[layer].entries_BN)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("quest_steps", {}, "eviction 'quest_steps' lets nothing go that could be read later"),
        ("h2o", {"unit": "tokens", "every": 4}, "eviction_every=4: what a prompt's eviction lets go is watched while"),
    ],
)
def test_what_cannot_be_watched_is_refused(name, options, words):
    compression = Compression(build_eviction(name), **({"keep": 8} if options else {"keep": 0.5}), **options)
    with pytest.raises(ValueError, match=words):
        watch_generation(
            compress(text_family()).eval(), text_batch(PROMPT_SIZES, True), compression, "query_aware", STEPS
        )
