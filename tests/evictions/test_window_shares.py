"""CAKE, HeadKV and SparseMM: what the releases keep, plain references, shares that last while decoding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.base import keep_best_entries
from subtoken_train.evictions.snapkv import HeadScores, head_budgets
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import View
from tests.support.golden_cases import close, keep_of, original_views, originals, record, same_places
from tests.support.prompt_views import (
    HEADS,
    KV_HEADS,
    LAYERS,
    dense_attention,
    layer_views,
    plan,
    samples,
    settings_for,
    written,
)
from tests.support.refusals import refuses

WINDOW, SIZE = 6, 16
CODES = [[1] + [3] * 24 + [4] * 5, [3] * 9 + [4] * 2, [3] * 13, [3] * 6 + [4]]


def test_scores_and_preferences_are_the_release_s():
    original = originals("cake")
    method = build_eviction("cake", window=WINDOW, tau1=1.6, tau2=0.4)
    found = [method.score(view) for view in original_views(method, original, Region.CONTEXT)]
    before = original["scores"].shape[-1]
    for layer, golden in enumerate(original["scores"]):
        close(method, "eviction_originals: scores", found[layer].scores_BhN[0, :, :before], golden)
    shares = torch.cat([each.weight_B for each in found]).softmax(0)
    close(method, "eviction_originals: shares", shares, original["preference"] / original["preference"].sum())


@pytest.mark.parametrize("word", ["once", "cascade"])
def test_sets_are_the_release_s_but_for_how_shares_are_rounded(word):
    """With its counts the sets are its own, cut in a cascade or once; our counts are within one of them."""
    method = build_eviction("cake", window=WINDOW, tau1=1.6, tau2=0.4)
    original = originals("cake")
    views, kept = original_views(method, original, Region.CONTEXT), original[f"{word}.kept"]
    for layer, view in enumerate(views):
        places = torch.stack([head.nonzero()[:, 0] for head in kept[layer]])[None]
        same_places(method, f"eviction_originals {word}", keep_of(method, [view], places.shape[-1])[0], places)
    regions, entries = [view.regions_BN for view in views], [view.entries_BN for view in views]
    candidates = Candidates(regions, entries, torch.full((len(views), 1), SIZE))
    ours = method.counts([method.score(view) for view in views], candidates)[:, 0].tolist()
    its = kept[:, 0].sum(-1).tolist()
    assert len(set(its)) > 2
    assert sum(ours) == sum(its) == SIZE * len(views)
    assert all(abs(own - other) <= 1 for own, other in zip(ours, its, strict=True))


def plain(matrix, window, method):
    """(scores [h, N], log preference) of one prompt without padding, number by number."""
    length = matrix.shape[-1]
    before, rows, matrix = length - window, range(length - window, length), matrix.double().tolist()
    entropy, scattered, of_head = 0.0, 0.0, []
    for head in matrix:
        value = []
        for column in range(before):
            seen = [head[row][column] for row in rows]
            mean = sum(seen) / window
            variance = sum((one - mean) ** 2 for one in seen) / max(window - 1, 1)
            entropy -= sum(one * math.log(one + 1e-10) for one in seen)
            scattered += variance
            value.append(mean + method.gamma * variance)
        half = method.kernel // 2
        of_head.append([sum(value[max(0, i - half) : i + half + 1]) / method.kernel for i in range(before)])
    group = len(matrix) // KV_HEADS
    means = [
        [sum(own[i] for own in of_head[head * group : (head + 1) * group]) / group for i in range(before)]
        for head in range(KV_HEADS)
    ]
    tiny = torch.finfo(torch.float32).tiny
    preference = math.log(max(entropy, tiny)) / method.tau1 + math.log(max(scattered, tiny)) / method.tau2
    return torch.tensor([row + [0.0] * window for row in means]), preference


@pytest.mark.parametrize("settings", [{}, {"gamma": 0.5, "kernel": 3, "tau1": 0.4, "tau2": 2.0}])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_equal_to_the_plain_reference(settings, pad):
    """A question in the window, one shorter than it, none, and one of a single row; rows that are no entries."""
    method = build_eviction("cake", window=4, **settings)
    view = layer_views(CODES, method.needs, pad, layers=1, dropped=[(0, 0.2)])[0]
    found = method.score(view.replaced(in_scope_BN=view.regions_BN == Region.CONTEXT))
    for (sample, entries, matrix, _, _), window in zip(samples(view), (4, 2, 4, 1), strict=True):
        expected, preference = plain(matrix, window, method)
        torch.testing.assert_close(found.scores_BhN[sample][:, entries], expected, rtol=1e-4, atol=1e-6)
        assert float(found.weight_B[sample]) == pytest.approx(preference, rel=1e-4)
        late = [place >= int(entries.sum()) - window for place in range(int(entries.sum()))]
        assert found.protected_BN[sample][entries].tolist() == late


def test_while_decoding_layers_keep_the_prompt_s_preferences():
    """Entries compete by the rows that are there; one row has no variance; heads with entries of their own alike."""
    method = build_eviction("cake", window=4, kernel=1)
    prompt = layer_views([[3] * 12], method.needs, layers=1)[0]
    first = method.score(prompt)
    assert first.carried.shape == (1, KV_HEADS, 12)
    query, key = prompt.query_BHNd[:, :, -1:], prompt.key_BhNd
    rows = {"place_BN": torch.arange(12)[None], "seen_B": torch.tensor([12])}
    given = (0, query, key, key, prompt.regions_BN, prompt.scale, method.needs)
    later = method.score(View(*given, carried=first.carried, heads=1, **rows))
    assert torch.equal(later.weight_B, first.weight_B)
    assert torch.equal(later.carried, first.carried)
    matrix = dense_attention(prompt.query_BHNd[0], key[0], [True] * 12, prompt.scale)[:, -1]
    torch.testing.assert_close(later.scores_BhN[0, :, :8], matrix.view(KV_HEADS, -1, 12).mean(1)[:, :8])
    apart = [each.transpose(0, 1).reshape(KV_HEADS, -1, *each.shape[2:]) for each in (query, key)]
    apart[0] = query[0].view(KV_HEADS, -1, *query.shape[2:])
    regions = prompt.regions_BN.expand(KV_HEADS, -1)
    rows = {key: each.expand(KV_HEADS, *each.shape[1:]) for key, each in rows.items()}
    carried = first.carried[0][:, None]
    given = (0, *apart, apart[1], regions, prompt.scale, method.needs)
    by_head = method.score(View(*given, carried=carried, heads=KV_HEADS, **rows))
    torch.testing.assert_close(by_head.scores_BhN[:, 0], later.scores_BhN[0])
    assert by_head.weight_B.tolist() == first.weight_B.tolist() * KV_HEADS


def claims_by_loop(score, floor, budget, window):
    """(window, claim) of every head, in real numbers, before anything is rounded or cut off."""
    window = [min(own, most) for own, most in zip(window, budget, strict=True)]
    left = [most - own for own, most in zip(window, budget, strict=True)]
    total = sum(score)
    claims = [
        floor * own + (1 - floor) * (each / total if total else 0) * sum(left)
        for own, each in zip(left, score, strict=True)
    ]
    return window, claims


@pytest.mark.parametrize(("name", "given"), [("headkv", {"floor": 0.2}), ("sparsemm", {})])
def test_sets_are_the_release_s_but_for_how_heads_are_rounded(tmp_path, name, given):
    """With its counts the sets are its own, where every head has keys; our counts are within one of them."""
    own = originals(name)
    layers, heads = own["kept"].shape[:2]
    score_Lh = own["score"].view(layers, heads, -1).sum(-1)  # sparsemm's file has one for each query head
    path = written(tmp_path / "heads.json", name, HeadScores(score_Lh.tolist()))
    method = build_eviction(name, window=6, calibration=path, **given)
    views = original_views(method, own, Region.CONTEXT)
    regions, entries = views[0].regions_BN, views[0].entries_BN
    scores, its = [method.score(view) for view in views], own["kept"].sum(-1)[:, None]
    ours = method.counts(scores, Candidates([regions] * layers, [entries] * layers, torch.full((layers, 1), 16)))
    assert int(ours.sum()) == 16 * layers * heads
    assert int((ours - its).abs().max()) <= 1
    kept = [keep_best_entries(x.scores_BhN, entries, x.protected_BN, n) for x, n in zip(scores, its, strict=True)]
    of_all = torch.cat([x.scores_BhN for x in scores])
    its_least = of_all.masked_fill(~own["kept"] | scores[0].protected_BN, torch.inf).amin(-1, keepdim=True)
    ties = (of_all == its_least) & (name == "headkv")  # neighbours tie, in no order
    differing = int(((torch.cat(kept) != own["kept"]) & ~ties).sum())
    record(name, f"eviction_originals: places that differ{' beyond ties' * (name == 'headkv')}", differing)
    assert differing == 0


@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_budgets_equal_a_loop_and_their_sum(seed, heads, floor):
    """Where no head is cut off, every one has its claim to an entry; the sum is the budgets' anyway."""
    draw = torch.Generator().manual_seed(seed)
    score = torch.randint(0, 4, (heads, 1), generator=draw) / 3  # with ties, and heads of 0
    most = torch.randint(1, 60, (heads, 1), generator=draw)
    budget = torch.minimum(torch.randint(1, 30, (heads, 1), generator=draw), most)
    window = torch.minimum(torch.randint(0, 6, (heads, 1), generator=draw), most)
    found = head_budgets(score, floor, budget, window, most)[:, 0]
    assert int(found.sum()) == int(budget.sum())
    assert (found >= torch.minimum(window, budget)[:, 0].clamp(min=1)).all()
    assert (found <= most[:, 0]).all()
    own, claims = claims_by_loop(score[:, 0].tolist(), floor, budget[:, 0].tolist(), window[:, 0].tolist())
    wanted = [a + b for a, b in zip(own, claims, strict=True)]
    if score.any() and all(1 <= each <= int(limit) for each, limit in zip(wanted, most, strict=True)):
        assert all(abs(int(count) - each) < 1 for count, each in zip(found, wanted, strict=True))


def test_while_decoding_a_head_that_is_a_row_has_the_same_share():
    """Rows of the batch are heads of a sample then: the same numbers as heads of a layer."""
    method = build_eviction("headkv", window=3, **settings_for("headkv"))
    views = layer_views([[3] * 40, [3] * 23], method.needs, "left")
    scores, counts, _, candidates = plan(method, views, 0.3)

    def rows(tensor):
        return tensor.repeat_interleave(KV_HEADS, 0)

    apart = [
        Scores(x.scores_BhN.flatten(0, 1)[:, None], rows(x.protected_BN), notes={"head": x.notes["head"].view(-1, 1)})
        for x in scores
    ]
    lists = [list(map(rows, each)) for each in (candidates.regions_LBN, candidates.competes_LBN)]
    of_rows = Candidates(*lists, candidates.budget_LB.repeat_interleave(KV_HEADS, 1), heads=KV_HEADS)
    assert torch.equal(method.counts(apart, of_rows)[..., 0].view(LAYERS, 2, KV_HEADS), counts)
    for view, both in zip(views, apart, strict=True):
        states = (
            view.query_BHNd.flatten(0, 1).unflatten(0, (-1, HEADS // KV_HEADS)),
            view.key_BhNd.flatten(0, 1)[:, None],
        )
        found = method.score(View(view.layer, *states, states[1], rows(view.regions_BN), view.scale, method.needs))
        assert torch.equal(found.notes["head"], both.notes["head"])
        torch.testing.assert_close(found.scores_BhN, both.scores_BhN)


def test_scores_that_are_none():
    for score, words in (([[0.0, 0.0]], "score is 0 for all heads"), ([[-1.0, 1.0]], r"score\[0\]\[0\] is -1")):
        refuses(words, HeadScores, score)
