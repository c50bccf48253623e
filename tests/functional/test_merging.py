"""Merging of dropped entries by key and by place, against loops and the releases' recorded outputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.functional import merging
from subtoken_train.functional.merging import joined_means, merged, nearest_anchor, nearest_key
from subtoken_train.reducers.tower import contextual_targets, contextual_tokens, dominant_tokens
from tests.support.golden_cases import alike, load, near
from tests.support.helpers import random_scores
from tests.support.plain_choices import merged_by_loop

KINDS = ("average", "weighted", "pivot", "position")


def drawn(seed, batch=3, heads=2, length=17, width=6, share=0.4, shared=False, dtype=torch.float32):
    """Keys, values, entries that stay [B, h or 1, N], and entries: padding on either side, heads of unlike sizes."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(batch, heads, length, width, generator=generator).to(dtype) for _ in range(2))
    entries = torch.rand(batch, length, generator=generator) < 0.8
    entries[0, :3], entries[-1, -4:] = False, False
    keep = torch.rand(batch, 1 if shared else heads, length, generator=generator) < share
    return key, value, keep & entries[:, None], entries


@given(
    seed=st.integers(0, 10**6),
    kind=st.sampled_from(KINDS),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    shared=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equals_a_plain_loop(seed, kind, share, shared, dtype):
    key, value, keep, entries = drawn(seed, share=share, shared=shared, dtype=dtype)
    got, bound = merged(kind, key, value, keep, entries), 1e-5 if dtype == torch.float32 else 0.02
    for sample, kept in enumerate(keep.expand(-1, key.shape[1], -1)):
        expected = merged_by_loop(kind, key[sample], value[sample], kept, entries[sample])
        for ours, plain in zip(got, expected, strict=True):
            assert ours.dtype == dtype  # what is dropped is never read
            assert not kept.any() or (ours[sample, kept].float() - plain[kept].float()).abs().max() < bound


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_nothing(kind):
    given = drawn(3)
    expected = merged(kind, *given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = merged(kind, *given)
    assert all(torch.equal(ours, plain) for ours, plain in zip(got, expected, strict=True))


def test_nothing_changes_without_merging_or_drops():
    key, value, _, entries = drawn(2)
    keep = entries[:, None].expand(-1, 2, -1)
    assert merged("none", key, value, keep & False, entries) == (key, value)
    for kind in KINDS:
        for ours, before in zip(merged(kind, key, value, keep, entries), (key, value), strict=True):
            assert torch.equal(ours, before)


def test_ties_go_to_the_earlier_row_and_blocks_change_nothing(monkeypatch):
    key, _, keep, entries = drawn(3, length=40)
    key[:, :, 20:] = key[:, :, :20]  # every key twice
    keep[:, :, 20:] = keep[:, :, :20]
    dropped = entries[:, None] & ~keep
    whole = nearest_key(key, keep, dropped, None)
    assert bool((whole[0][dropped] < 20).all())
    for pairs in (1, 100, 1000):
        monkeypatch.setattr(merging, "PAIRS", pairs)
        for one, other in zip(nearest_key(key, keep, dropped, None), whole, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["weighted", "pivot"])
def test_golden_of_the_factory(shared, kind):
    """Its kept entries are the chosen ones, in their order, and the last ``window_size``."""
    params, tensors = load(shared, f"merge_{kind}")
    key, value, chosen = tensors["keys"], tensors["values"], tensors["selected_positions"]
    length = key.shape[2]
    places = torch.cat([chosen, torch.arange(length - params["window_size"], length).expand(*chosen.shape[:2], -1)], 2)
    keep = torch.zeros(key.shape[:3], dtype=torch.bool).scatter(2, places, True)
    got = merged(kind, key, value, keep, torch.ones(len(key), length, dtype=torch.bool))
    for name, ours in zip(("keys_out", "values_out"), got, strict=True):
        taken = ours.gather(2, places[..., None].expand(-1, -1, -1, key.shape[-1]))
        near("merge", f"merge_{kind}: {name}", taken, tensors[name], rtol=1e-5, atol=1e-5)


def test_a_shared_set_serves_every_head_and_an_entry_alone_is_not_rounded():
    states, anchors = torch.randn(1, 2, 6, 4).bfloat16(), torch.tensor([[[1, 0, 0, 0, 1, 1]]], dtype=torch.bool)
    target = nearest_anchor(anchors, torch.ones(1, 6, dtype=torch.bool))
    assert target.tolist() == [[[0, 0, 0, 4, 4, 5]]]  # row 2 is as near to both
    joined = joined_means(states, target)
    assert torch.equal(joined[:, :, 5], states[:, :, 5])
    torch.testing.assert_close(joined[:, :, 4], states[:, :, 3:5].float().mean(2).bfloat16())


def test_elastic_as_released_joins_the_same_way(shared):
    """Its ranking is a bug (``argsort`` taken for a rank, dropped places without the offset); the joining is ours."""
    params, tensors = load(shared, "elasticcache_as_released")
    start, length = params["start_size"], params["T"]
    forget = int(length - length * (1 - params["ratio"]))
    for layer in range(params["L"]):
        order = tensors["score_sum"][layer, start : length - 1].argsort()
        kept = (order > forget).nonzero()[:, 0] + start
        dropped = (order <= forget).nonzero()[:, 0]  # the bug: ``start`` is not added
        target = torch.arange(length)
        target[dropped] = kept[(kept[None] - dropped[:, None]).abs().argmin(1)]
        # by the bug a row can be dropped and kept: it stays where it is, and a copy of it goes elsewhere
        both = torch.isin(dropped, kept)
        moved = torch.cat([torch.arange(length), dropped[both]])
        goes = torch.arange(length).index_copy(0, dropped[~both], target[dropped[~both]])
        goes = torch.cat([goes, target[dropped[both]]])
        out = torch.cat([torch.arange(start), kept, torch.tensor([length - 1])])
        for name in ("keys", "values"):
            joined = joined_means(tensors[name][layer][:, :, moved], goes[None, None])
            expected = tensors[f"{name}_out_layer{layer}"]
            near("elastic", f"elasticcache_as_released: {name} joined", joined[:, :, out], expected)


def visionzip_by_loop(tokens, keys, targets):
    """One token at a time: find its target, sum, divide, add to the target."""
    groups = {target: [] for target in targets}
    for place in range(len(tokens)):
        if place not in groups:
            similarity = {t: float(torch.cosine_similarity(keys[place], keys[t], dim=0)) for t in targets}
            groups[max(targets, key=lambda t: similarity[t])].append(tokens[place])
    return [tokens[t] + (torch.stack(joined).mean(0) if joined else 0) for t, joined in groups.items()]


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 100))
def test_merging_equals_a_plain_loop(rest, count, seed):
    tokens, keys, count = random_scores(seed, rest, 6), random_scores(seed + 1, rest, 4), min(rest, count)
    targets = contextual_targets(rest, count)
    assert len(set(targets.tolist())) == count
    merged = contextual_tokens(tokens, keys, targets)
    torch.testing.assert_close(merged, torch.stack(visionzip_by_loop(tokens, keys, targets.tolist())))


def test_nothing_to_merge_into_and_nothing_to_merge():
    tokens = random_scores(0, 5, 3)
    assert contextual_tokens(tokens, tokens, contextual_targets(5, 0)).shape == (0, 3)
    assert torch.equal(contextual_tokens(tokens, tokens, contextual_targets(5, 5)), tokens)
    assert contextual_tokens(tokens[:0], tokens[:0], contextual_targets(0, 0)).shape == (0, 3)


def test_bf16_tokens_are_averaged_in_fp32():
    tokens = torch.cat([torch.zeros(1, 1), torch.full((300, 1), 1.0)]).bfloat16()
    assert contextual_tokens(tokens, torch.ones(301, 2), torch.tensor([0])).item() == 1.0


def test_dominant_tokens_come_in_order_and_ties_go_to_the_lower_index():
    assert dominant_tokens(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0]), 3).tolist() == [1, 2, 3]
    assert dominant_tokens(torch.ones(4), 0).tolist() == []


def test_golden_of_the_clip_release(shared):
    params, golden = load(shared, "visionzip_clip")
    for sample, expected in enumerate(golden["tokens_out"]):
        received, states = golden["attentions_m2"][sample].sum(0)[0, 1:], golden["hidden_states_m2"][sample]
        dominant = dominant_tokens(received, params["dominant_num"])
        assert {0, *(dominant + 1).tolist()} == set(golden["all_indices"][sample].tolist())
        rest = torch.ones(len(received), dtype=torch.bool)
        rest[dominant] = False
        targets = contextual_targets(int(rest.sum()), params["contextual"])
        merged = contextual_tokens(states[1:][rest], golden["metric_m2"][sample, 1:][rest], targets)
        ours = torch.cat([states[:1], states[1:][dominant], merged])
        near("visionzip", "visionzip_clip: tokens", ours, expected, atol=1e-5)


def test_golden_of_the_qwen_release(shared):
    params, golden = load(shared, "visionzip_qwen25vl_lightcompress")
    assert len(golden["input_ids"]) == 1  # the release takes one prompt at a time
    ids, embeds, out = (golden[name][0] for name in ("input_ids", "inputs_embeds", "inputs_embeds_out"))
    visual, text = ((ids == params["vision_token_index"]) == seen for seen in (True, False))
    visual, text = visual.nonzero()[:, 0], text.nonzero()[:, 0]
    tokens = embeds[visual]
    dominant = dominant_tokens(golden["score_merged"], int(params["dominant_ratio"] * len(tokens)))
    rest = torch.ones(len(tokens), dtype=torch.bool)
    rest[dominant] = False
    targets = contextual_targets(int(rest.sum()), max(int(params["contextual_ratio"] * len(tokens)), 1))
    merged = contextual_tokens(tokens[rest], golden["key_merged"].mean(0)[rest], targets)
    places = rest.nonzero()[targets, 0]
    positions = torch.cat([visual[sorted([*dominant.tolist(), *places.tolist()])], text]).sort().values
    alike("visionzip", "visionzip_qwen25vl_lightcompress", positions, golden["kept_positions"])
    ours = embeds.index_copy(0, visual, tokens.index_copy(0, places, merged))[golden["kept_positions"]]
    near("visionzip", "visionzip_qwen25vl_lightcompress: embeddings", ours, out, rtol=1e-5)
