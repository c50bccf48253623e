"""Ada-KV and CriticalKV: heads share a budget, two stages of each; the papers by plain references."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.keys import KNorm
from subtoken_train.evictions.snapkv import SnapKV
from subtoken_train.evictions.wrappers import NORM, ROWS, Ada, CriticalKV, pair_counts, projected_norm, two_stages
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View
from tests.support.golden_cases import alike, close, golden_view, keep_of, load, record, same_places
from tests.support.prompt_views import EXTREME, HEADS, KV_HEADS, PROMPTS, WIDTH, draw_scores, layer_views, plan


def plain_sets(scores, competes, protected, total, floor):
    """Kept places of one sample's heads: first what is safe, then the best pairs of all heads, one after another."""
    able = [place for place, able in enumerate(competes) if able]
    heads, equal = range(len(scores)), total // len(scores)
    safe = max(floor, min(sum(protected[place] for place in able), equal), 1)

    def ranked(head):
        always = sorted((place for place in able if protected[place]), reverse=True)
        others = sorted((place for place in able if not protected[place]), key=lambda place: -scores[head][place])
        return always + others

    kept = [set(ranked(head)[:safe]) for head in heads]
    pairs = [(head, place) for head in heads for place in able if place not in kept[head]]
    for head, place in sorted(pairs, key=lambda pair: -scores[pair[0]][pair[1]]):
        if sum(map(len, kept)) < total:
            kept[head].add(place)
    return kept


@st.composite
def choices(draw):
    scores, competes, protected = draw_scores(draw, 4, 9, [*EXTREME, 0.25])
    batch, heads, length = scores.shape
    counts = torch.tensor(draw(st.lists(st.integers(1, length + 1), min_size=batch, max_size=batch)))
    floors = torch.tensor([draw(st.integers(0, each)) for each in counts.tolist()])
    return scores, competes, protected, counts * heads, floors


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(choices())
def test_counts_are_those_of_the_plain_choice(choice):
    scores, competes, protected, totals, floors = choice
    counts = pair_counts(*choice)
    assert counts.dtype == torch.int64
    for sample, total in enumerate(totals.tolist()):
        of_sample = (each[sample].tolist() for each in (scores, competes, protected))
        assert counts[sample].tolist() == [len(each) for each in plain_sets(*of_sample, total, int(floors[sample]))]
        assert int(counts[sample].sum()) == min(total, int(competes[sample].sum()) * scores.shape[1])


@pytest.mark.parametrize("safeguard", ["floor", "blend"])
@pytest.mark.parametrize("base", ["knorm", "snapkv", "pyramidkv"])
@pytest.mark.parametrize("keep", [0.05, 0.4, 1.0])
def test_a_layer_keeps_exactly_its_base_s_budget(safeguard, base, keep):
    base = build_eviction(base, **({} if base == "knorm" else {"window": 4}))
    method = Ada(base, safeguard=safeguard)
    views = layer_views(list(PROMPTS.values()), method.needs, "left", dropped=[(1, 0.5)])
    scores, counts, kept, candidates = plan(method, views, keep)
    base_counts = base.counts(scores, candidates)
    assert counts.shape == (*base_counts.shape, KV_HEADS)
    assert torch.equal(counts.sum(-1), base_counts * KV_HEADS)
    for layer, view in enumerate(views):
        assert torch.equal((kept[layer] & view.entries_BN[:, None]).sum(-1), counts[layer])
        protected = scores[layer].protected_BN & candidates.competes_LBN[layer]
        assert (counts[layer] >= torch.minimum(protected.sum(-1), base_counts[layer])[:, None]).all()
        assert (counts[layer] >= (base_counts[layer] * 2 // 10)[:, None]).all()
    assert bool((counts[..., 0] != counts[..., 1]).any()) == (keep == 0.4)  # a tenth is no more than snapkv's window


def test_sums_of_scores_below_0_are_refused():
    method = Ada(KNorm(), normalise=True)
    with pytest.raises(ValueError, match="ada normalise compares sums of scores, and those of knorm are below 0"):
        plan(method, layer_views([PROMPTS["context"]], method.needs), 0.5)


def test_golden_kvpress(shared):
    params, tensors = load(shared, "kvpress_adakv")
    method = Ada(SnapKV(params["window_size"], params["kernel_size"], rows="mean"), alpha=params["alpha_safeguard"])
    kept = keep_of(method, [golden_view(method, tensors)], int(params["T"] * (1 - params["compression_ratio"])))[0]
    assert torch.equal(kept.sum(-1), tensors["kept_per_head"])
    alike("ada", "kvpress_adakv", kept, ~tensors["evicted_mask"])


@pytest.mark.parametrize("case", ["floor0.2_normTrue", "floor0.5_normFalse"])
def test_the_release_rounds_heads_by_themselves_and_misses_the_budget(shared, case):
    """Its counts are those of our pairs before rounding; ours add up to the budget and differ by less than an entry."""
    params, tensors = load(shared, f"adakv_original_{case}")
    window, alpha = params["window_size"], params["floor_alpha"]
    base = SnapKV(window, params["kernel_size"], "max", "kv_head", "mean")
    method = Ada(base, alpha=alpha, safeguard="blend", normalise=params["normalize"])
    view = golden_view(method, tensors)
    scores, count = method.score(view), params["base_capacity"]
    assert torch.allclose(scores.scores_BhN[..., :-window], tensors["pooled_scores"], atol=1e-6)
    candidates = Candidates([view.regions_BN], [view.entries_BN], torch.tensor([[count]]))
    ours, theirs = method.counts([scores], candidates)[0, 0], tensors["head_lens"]
    won = Ada(base, alpha=0.0, safeguard="blend", normalise=params["normalize"]).counts([scores], candidates)[0, 0]
    rounded = torch.round((won - window) * (1 - alpha)) + int(alpha * (count - window)) + window
    assert rounded.tolist() == theirs.tolist()
    assert int(ours.sum()) == params["Hkv"] * count
    assert ((ours - theirs).abs() <= 1).all()
    record("ada", f"adakv_original_{case}: entries by which the release misses its budget",
           int((theirs.sum() - ours.sum()).abs()))  # fmt: skip


def plain_critical(scores, norms, count, first_share, epsilon):
    """Algorithm 1 of the paper for one head: kept places."""
    stage_1 = sorted(range(len(scores)), key=lambda place: -scores[place])[: math.floor(count * first_share)]
    weighed = {i: (scores[i] + epsilon) * norms[i] for i in range(len(scores)) if i not in stage_1}
    return {*stage_1, *sorted(weighed, key=lambda place: -weighed[place])[: count - len(stage_1)]}


@pytest.mark.parametrize("rows", [4, ROWS])
def test_norms_are_those_of_every_query_head(monkeypatch, rows):
    """Of all entries at once, and of a few at a time."""
    monkeypatch.setattr("subtoken_train.evictions.wrappers.ROWS", rows)
    view = layer_views([PROMPTS["context"]], KNorm.needs | {"values"})[0]
    found, group = projected_norm(view.value_BhNd, view.output_weight())[0], HEADS // KV_HEADS
    for head in range(KV_HEADS):
        own = [view.output_weight()[:, i * WIDTH : (i + 1) * WIDTH] for i in range(head * group, (head + 1) * group)]
        for norm, value in zip(found[head], view.value_BhNd[0, head], strict=True):
            of_heads = [sum(abs(float(row @ value)) for row in weight_Dd) for weight_Dd in own]
            assert float(norm) == pytest.approx(sum(of_heads) / group, rel=1e-5)


@pytest.mark.parametrize("first_share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 5, 12])
def test_kept_sets_are_those_of_the_paper(first_share, count):
    method = CriticalKV(SnapKV(window=4), first_share=first_share, epsilon=0.01)
    codes = PROMPTS["context"]
    views = layer_views([codes, PROMPTS["no image"]], method.needs, "left")
    scores = [method.score(view) for view in views]
    competes = [view.regions_BN == Region.CONTEXT for view in views]
    budget = torch.tensor([[count, 0]] * len(views))
    kept = method.keep(scores, Candidates([view.regions_BN for view in views], competes, budget))
    for layer, view in enumerate(views):
        start = view.regions_BN.shape[1] - len(codes)
        span = slice(start, start + codes.count(int(Region.CONTEXT)))
        for head in range(KV_HEADS):
            its, norms = (it[0, head, span].tolist() for it in (scores[layer].scores_BhN, scores[layer].notes[NORM]))
            expected = plain_critical(its, norms, count, first_share, 0.01)
            assert set(kept[layer][0, head, span].nonzero()[:, 0].tolist()) == expected


def test_golden(shared):
    params, tensors = load(shared, "kvpress_criticalkv_knorm")
    key, value, weight = (tensors[name] for name in ("key", "value", "o_proj_weight"))
    method = CriticalKV(KNorm(), params["first_stage_ratio"], params["epsilon"])
    view = View(
        0, key, key, value, torch.full(key.shape[::2], int(Region.QUERY)), 1.0, method.needs,
        output_weight=lambda: weight,
    )  # fmt: skip
    scores = method.score(view)
    close(method, "kvpress_criticalkv_knorm: norms", scores.notes[NORM], tensors["projected_norm"])
    count = torch.tensor([params["n_kept"]] * params["B"])
    theirs, largest = tensors["scores"], torch.finfo(torch.float32).max
    ours = method.at_budget(scores, view.entries_BN, count).scores_BhN
    second = theirs < largest
    close(method, "kvpress_criticalkv_knorm: second stage", ours[second], theirs[second])
    assert (ours.masked_fill(second, torch.inf).amin(-1) > ours.masked_fill(~second, -torch.inf).amax(-1)).all()
    kept = method.keep([scores], Candidates([view.regions_BN], [view.entries_BN], count[None]))[0]
    same_places(method, "kvpress_criticalkv_knorm", kept, tensors["kept"])


def released_critical_ada(scores, norms, count, alpha, first_share, epsilon):
    """Kvpress's CriticalAdaKVPress for one sample of one layer, head by head: kept places."""
    heads, length = scores.shape
    first = scores.clone()
    safe = int(count * alpha)
    first.scatter_(-1, first.topk(safe, dim=-1).indices, torch.inf)
    owners = first.flatten().topk(heads * count).indices // length
    kept = []
    for head in range(heads):
        budget = int((owners == head).sum())
        its = first[head].tolist()
        kept.append(plain_critical(its, norms[head].tolist(), budget, first_share, epsilon))
        safest = sorted(range(length), key=lambda place: -its[place])[:safe]
        assert set(safest) <= kept[-1] or safe > budget * first_share
    return kept


@pytest.mark.parametrize("chain", ["ada(critical(snapkv))", "critical(ada(snapkv))"])
@pytest.mark.parametrize("count", [8, 16])
def test_critical_ada_is_the_paper_s(chain, count):
    """Heads win by the base's scores; then each head's own budget is halved. In either order of the two."""
    method = build_eviction(chain, window=2, epsilon=0.01)
    views = layer_views([PROMPTS["no image"] * 3], method.needs)
    scores = [method.score(view) for view in views]
    places = torch.arange(views[0].regions_BN.shape[1])
    for each in scores:  # as in the release, where the window has the largest score
        each.scores_BhN = each.scores_BhN.masked_fill(each.protected_BN[:, None], 10.0)
        each.protected_BN = torch.zeros_like(each.protected_BN)
    entries = [view.entries_BN for view in views]
    budget = torch.full((len(views), 1), count)
    kept = method.keep(scores, Candidates([view.regions_BN for view in views], entries, budget))
    for layer, its in enumerate(scores):
        expected = released_critical_ada(its.scores_BhN[0], its.notes[NORM][0], count, 0.2, 0.5, 0.01)
        assert [set(places[row].tolist()) for row in kept[layer][0]] == expected
        assert sum(map(len, expected)) == KV_HEADS * count


def test_scores_of_any_size_stay_numbers_in_their_order():
    scores = torch.tensor([[[-torch.inf, -3e38, 0.0, 1.0, 3e38, torch.inf]]])
    norm = torch.tensor([[[0.0, 5.0, 0.0, 2.0, 1e30, 1e30]]])
    found = two_stages(scores, torch.tensor([[[True, False, False, False, False, False]]]), norm, 0.0)
    assert found.isfinite().all()
    assert found[0, 0, 0] > found[0, 0, 1:].max()
    second = found[0, 0, 1:].tolist()
    assert second == sorted(second)
