"""SparseVLM against the release's golden and a plain loop over a model; counts, places, refusals, gradients."""

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import keep_ranked
from subtoken_train.reducers.sparsevlm import LISTS, kept_of, recycled_counts, text_raters
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from subtoken_train.view.view import View
from tests.support.golden_cases import alike, load, near
from tests.support.helpers import compress, gqa_family, make_batch, only_sample, random_scores, sharpen
from tests.support.plain_choices import clusters_by_loop
from tests.support.tiny.qwen import qwen_family
from tests.support.truth_models import prompts

RELEASED = {1: [(300, 200, 110), (303, 110, 36), (238, 48, 26), (66, 30, 17)], 2: LISTS[2]}


def test_golden_raters(shared):
    _, tensors = load(shared, "sparsevlm")
    mean = (tensors["visual_hidden"] @ tensors["text_hidden"].mT).softmax(-1).mean(1)
    near("sparsevlm", "sparsevlm: raters", mean, tensors["rater_mean"])
    for visual, text in zip(tensors["visual_hidden"], tensors["text_hidden"], strict=True):
        assert torch.equal(text_raters(visual, text).nonzero()[:, 0], tensors["text_rater_idx"])


def test_golden_scores_and_masks(shared):
    """All three are of the whole image, as the golden takes them."""
    params, tensors = load(shared, "sparsevlm")
    logits = tensors["queries"] @ tensors["keys"].mT * params["logit_scale"]
    length, start, count = logits.shape[-1], params["pre"], params["n_visual"]
    attention = logits.masked_fill(~torch.ones(length, length).bool().tril(), -torch.inf).softmax(-1)
    regions = torch.full((1, length), int(Region.QUERY))
    regions[:, :start], regions[:, start : start + count] = Region.SYSTEM, Region.VISUAL
    asking = torch.zeros(1, length, dtype=torch.bool)
    asking[0, start + count + tensors["text_rater_idx"]] = True

    def blocks(marks):
        for row in marks[0].nonzero()[:, 0].split(4):
            yield row[None], attention[:, :, row]

    def pulls(marks):
        return (torch.ones(1, len(row), length) for row in marks[0].nonzero()[:, 0].split(4))

    nothing = torch.zeros_like(asking)
    for layer, keep in zip(params["layers"], params["keep"], strict=True):
        number = torch.tensor([keep])
        view = View(layer=layer + 1, regions_BN=regions, raters_BN=asking, attention=blocks, rotary_pull=pulls)
        scores = build_reducer("sparsevlm", 0.5).scores(view)
        near("sparsevlm", "sparsevlm: scores", scores[:, start : start + count], tensors[f"score_layer{layer}"])
        mask = keep_ranked(scores, regions, nothing, number, False)[0][:, start : start + count]
        alike("sparsevlm", "sparsevlm", mask, tensors[f"mask_layer{layer}"])


@pytest.mark.parametrize("version", [1, 2])
def test_lists_are_the_releases_at_their_own_averages(version):
    """Version 1 holds the recycled tokens too: a tenth of 30 % of what leaves."""
    for kept, held in zip(RELEASED[version], LISTS[version], strict=True):
        before = 576
        for keep, left in zip(kept, held, strict=True):
            dropped = before - keep
            assert left == keep + (0 if version == 2 else int((int(dropped * 0.3) + 1) / 10) + 1)
            assert version == 2 or kept_of(before, left) == keep
            before = left
        average = Fraction(3 * 576 + 4 * held[0] + 9 * held[1] + 16 * held[2], 32 * 576)
        tokens = build_reducer("sparsevlm", average, version=version).layer_tokens(576, 32)
        assert tokens == [576] * 3 + [held[0]] * 4 + [held[1]] * 9 + [held[2]] * 16


@given(st.integers(2, 100), st.fractions(0, 1), st.sampled_from([1, 2]), st.integers(1, 600))
@settings(max_examples=60, deadline=None)
def test_shares_fall_and_average_to_the_keep_ratio(depth, part, version, tokens):
    first = build_reducer("sparsevlm", version=version).cuts(depth)[0]
    ratio = float(Fraction(first, depth) + part * (1 - Fraction(first, depth)))
    reducer = build_reducer("sparsevlm", max(ratio, first / depth + 1e-3), version=version)
    shares = reducer.layer_shares(depth)
    assert sum(shares) / depth == Fraction(str(reducer.keep_ratio))
    assert all(more >= less > 0 for more, less in pairwise(shares))
    assert shares[:first] == [1] * first
    assert reducer.layer_tokens(tokens, depth)[-1] >= 1


@given(st.integers(1, 700), st.integers(1, 700))
def test_what_stays_and_what_is_recycled_make_the_count(tokens, left):
    left = min(tokens, left)
    kept = kept_of(tokens, left)
    assert 1 <= kept <= left
    assert kept + recycled_counts(tokens - kept)[1] == left or kept == left < 1 + recycled_counts(tokens - 1)[1]


def rated(family, layer, hidden, position, raters, visual, version, heads):
    """What the raters make of the visual rows in a layer, by loops over heads and raters."""
    block = family.decoder.layers[layer]
    normed = block.input_layernorm(hidden[None])
    query, key = family.query_heads(layer, normed), family.key_heads(layer, normed)
    cos, sin = family.decoder.rotary_emb(normed, position[None])
    query, key = family.rotate(layer, query, key, (cos, sin))
    _, ones = family.rotate(layer, torch.ones_like(key), torch.ones_like(key), (cos, sin))
    per_head = []
    for head in range(query.shape[1]):
        shared = head // (query.shape[1] // key.shape[1])
        total = torch.zeros(len(visual))
        for row in raters:
            logits = query[0, head, row] @ key[0, shared, : row + 1].T * block.self_attn.scaling
            paid = torch.zeros(len(hidden)).index_copy(0, torch.arange(row + 1), logits.softmax(-1))[visual]
            if version == 2:
                paid = paid / (ones[0, 0, row] @ ones[0, 0, visual].T * block.self_attn.scaling)
            total += paid
        per_head.append(total / len(raters))
    if version == 2:
        per_head = sorted(per_head, key=lambda total: -float(total.sum()))[:heads]
    return torch.stack(per_head).mean(0)


def by_the_release(family, batch, reducer):
    """One sample: rows and positions of every stage, and the last layer's output."""
    hidden, regions = family.embed(batch)[0], batch.regions_BN[0].tolist()
    depth, rows = len(family.decoder.layers), list(range(len(regions)))
    text = [n for n in rows if regions[n] == Region.QUERY and n <= int(batch.rank_position_B[0])]
    image = [n for n in rows if regions[n] == Region.VISUAL]
    nearness = (hidden[image] @ hidden[text].T).softmax(-1).mean(0)
    asking = [n for n, value in zip(text, nearness, strict=True) if value > nearness.mean()]
    places, stages, start = list(rows), [], 0
    counts = reducer.layer_tokens(len(image), depth)
    for stop in (*reducer.cuts(depth), depth):
        stages.append((rows, places))
        for layer in range(start, stop):
            given, position = hidden, torch.tensor(places)
            every, span = torch.ones(1, len(rows)).bool(), {"start": layer, "stop": layer + 1}
            hidden = family.run_layers(hidden[None], every, position[None], **span)[0]
        start = stop
        if stop == depth:
            break
        visual = [i for i, n in enumerate(rows) if regions[n] == Region.VISUAL]
        raters = [i for i, n in enumerate(rows) if n in asking]
        score = rated(family, stop - 1, given, torch.tensor(places), raters, visual, reducer.version, reducer.heads)
        order = [visual[i] for i in sorted(range(len(visual)), key=lambda i: -float(score[i]))]
        stays, left = set(order[: counts[stop]]), counts[stop]
        if reducer.version == 1:
            kept = max(k for k in range(1, left + 1) if k + int((int((len(order) - k) * 0.3) + 1) / 10) + 1 <= left)
            again = order[kept : kept + int((len(order) - kept) * 0.3) + 1]
            centres, cluster = clusters_by_loop(hidden[again], left - kept)
            members = [[row for row, own in zip(again, cluster, strict=True) if own == c] for c in range(left - kept)]
            means = [hidden[own].mean(0) for own in members]
            stays = set(order[:kept]) | {again[centre] for centre in centres}
            hidden = hidden.index_copy(0, torch.tensor([again[centre] for centre in centres]), torch.stack(means))
        keep = [i for i in range(len(rows)) if i in stays or regions[rows[i]] != Region.VISUAL]
        hidden, rows = hidden[keep], [rows[i] for i in keep]
        anew = list(range(len(regions) - len(keep), len(regions)))
        places = anew if reducer.version == 1 else [places[i] for i in keep]
    return stages, hidden


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("heads", ["multi_head", "grouped_query"])
def test_a_pass_is_the_releases_whatever_the_batch_and_the_padding(tiny_family, heads, version, pad_left):
    family = tiny_family if heads == "multi_head" else gqa_family()
    sharpen(family)
    batch = make_batch([(1, 9), (2, 7), (0, 12)], pad_left)
    backbone = compress(family, name="sparsevlm", keep_ratio=0.6, version=version, heads=2)
    result = backbone.run(batch, pad_left=pad_left)
    for sample in range(3):
        alone = only_sample(batch, sample)
        first = int((batch.regions_BN[sample] == Region.PADDING).sum()) if pad_left else 0
        if not alone.images_per_sample_B.sum():
            assert result.rows.visible_BM[sample].sum() == 14
            continue
        stages, hidden = by_the_release(family, alone, backbone.reducer)
        for (rows, places), (_, _, ours) in zip(stages, result.spans, strict=True):
            seen = ours.visible_BM[sample]
            assert (ours.index_BM[sample, seen] - first).tolist() == rows
            assert ours.position[sample, seen].tolist() == places
        torch.testing.assert_close(
            result.hidden_BMD[sample, result.rows.visible_BM[sample]], hidden, rtol=1e-4, atol=1e-4
        )
    assert result.rows.next_position[:, 0].tolist() == [75, 137, 14]


def test_under_mrope_rows_keep_their_own_positions():
    family = qwen_family()
    result = compress(family, name="sparsevlm", keep_ratio=0.6).run(prompts(family, "three", False))
    whole = result.spans[0][2]
    for _, _, rows in result.spans[1:]:
        assert torch.equal(rows.position, whole.position.gather(-1, rows.index_BM.expand(3, -1, -1)))
        assert torch.equal(rows.next_position, whole.next_position)


def test_without_text_the_last_token_rates_and_a_text_without_a_rater_rates_whole():
    embeds = random_scores(0, 8, 4)[None]
    regions = torch.tensor([[Region.SYSTEM] + [Region.VISUAL] * 7])
    reducer, prompt = build_reducer("sparsevlm", 0.5), torch.ones(1, 8, dtype=torch.bool)
    assert reducer.raters(embeds, regions, prompt)[0].nonzero()[:, 0].tolist() == [7]
    regions[0, 6:] = Region.QUERY
    embeds[0, 7] = embeds[0, 6]
    assert reducer.raters(embeds, regions, prompt)[0].nonzero()[:, 0].tolist() == [6, 7]
    assert not reducer.raters(embeds, regions, ~prompt).any()


def test_gradients_reach_recycled_rows_and_routers_above_the_first_cut(tiny_family):
    backbone = compress(tiny_family, RoutingConfig("linear", 8, 3), name="sparsevlm", keep_ratio=0.6)
    below = []
    first = backbone.family.decoder.layers[0]
    first.register_forward_hook(lambda _, __, out: below.append(out) or out.retain_grad())
    result = backbone.run(make_batch([(1, 9)]))
    backbone.logits(result).square().mean().backward()
    touched = below[0].grad[0].abs().sum(-1) > 0
    stays = torch.isin(torch.arange(75), result.spans[1][2].index_BM[0])
    assert touched[stays].all()
    kept = kept_of(64, int((stays[2:66]).sum()))
    assert int(touched[~stays].sum()) == recycled_counts(64 - kept)[0] - recycled_counts(64 - kept)[1]
    assert [all(p.grad is not None for p in it.parameters()) for it in backbone.bank.selectors] == [False] + [True] * 3
