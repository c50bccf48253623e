"""SnapKV, PyramidKV, CAKE, HeadKV and SparseMM beside plain references and releases; windows as shares."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import base, build_eviction
from subtoken_train.evictions.base import keep_best_entries
from subtoken_train.evictions.snapkv import HeadScores, exact_pyramid, head_budgets, kvpress_pyramid, original_pyramid
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import prefill
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import View
from tests.support import prompt_views
from tests.support.golden_cases import close, golden_view, keep_of, load, original_views, originals, record, same_places
from tests.support.helpers import compress
from tests.support.prompt_views import layer_views, samples
from tests.support.refusals import refuses
from tests.support.text_families import text_batch, text_family


def test_golden_original_max_pooling(shared):
    """Neighbours share a maximum, and the original's choice between them is arbitrary: kept scores are compared."""
    params, tensors = load(shared, "snapkv_original_maxpool")
    method = build_eviction("snapkv", window=params["window_size"], kernel=params["kernel_size"], pooling="max")
    view = golden_view(method, tensors, "keys_repeated")
    scores = method.score(view).scores_BhN
    kept = keep_of(method, [view], params["max_capacity_prompt"])[0]
    places = torch.zeros_like(kept).scatter(2, tensors["kept_positions"], True)
    before = kept.shape[-1] - params["window_size"]
    assert kept[..., before:].all()
    assert places[..., before:].all()
    ours, golden = (scores[chosen].view(*scores.shape[:2], -1).sort(-1).values for chosen in (kept, places))
    close(method, "snapkv_original_maxpool: kept scores", ours, golden, rtol=0, atol=0)


def plain_scores(matrix, kv_heads, method):
    """Scores of one prompt without padding, list by list."""
    length = matrix.shape[-1]
    window = min(method.window, length)
    before = length - window
    per_head = matrix[:, before:].sum(1)[:, :before] / (window if method.rows == "mean" else 1)

    def pool(row):
        half, row = method.kernel // 2, row.tolist()
        near = [row[max(0, j - half) : j + half + 1] for j in range(before)]
        return torch.tensor([max(some) if method.pooling == "max" else sum(some) / method.kernel for some in near])

    def reduce(rows):
        grouped = rows.view(kv_heads, len(rows) // kv_heads, before)
        return grouped.mean(1) if method.group == "mean" else grouped.amax(1)

    if method.pool_per == "query_head":
        pooled = reduce(torch.stack([pool(row) for row in per_head]))
    else:
        pooled = torch.stack([pool(row) for row in reduce(per_head)])
    return torch.cat([pooled, torch.zeros(kv_heads, window)], -1)


@pytest.mark.parametrize(
    ("pooling", "pool_per", "rows", "group", "window", "kernel"),
    [
        (*words, window, kernel)
        for words in itertools.product(["avg", "max"], ["query_head", "kv_head"], ["sum", "mean"], ["mean", "max"])
        for window, kernel in [(4, 5), (10, 3)]
    ],
)
def test_equal_to_the_plain_reference(pooling, pool_per, rows, group, window, kernel):
    """Left padding, two lengths (one shorter than a window of 10), and rows that are no entries."""
    method = build_eviction(
        "snapkv", pooling=pooling, pool_per=pool_per, rows=rows, group=group, window=window, kernel=kernel
    )
    view = layer_views([[1] + [2] * 14 + [4] * 4, [4] * 9], method.needs, "left", layers=1, dropped=[(0, 0.3)])[0]
    found = method.score(view)
    for sample, entries, matrix, key, _ in samples(view):
        length = len(matrix[0])
        assert torch.allclose(found.scores_BhN[sample][:, entries], plain_scores(matrix, len(key), method), atol=1e-6)
        assert found.protected_BN[sample][entries].tolist() == [index >= length - window for index in range(length)]
        assert not found.protected_BN[sample][~entries].any()


def column(value, layers):
    return torch.full((layers, 1), value)


def table_cases(shared, name):
    """A golden table by configuration: its first five columns, and the counts of the layers in order."""
    cases = {}
    for *case, layer, count in load(shared, name)[1]["table"].tolist():
        counts = cases.setdefault(tuple(case), [])
        assert layer == len(counts)
        counts.append(count)
    return cases


def test_golden_places(shared):
    """The released code's counts and places in every layer; all layers together are off the budget, ours are not."""
    params, tensors = load(shared, "pyramidkv_factory")
    layers, budget = params["num_hidden_layers"], params["max_capacity_prompt"]
    shape = {"window": params["window_size"], "kernel": params["kernel_size"], "beta": params["beta"]}
    method = build_eviction("pyramidkv", budgets="original", pool_per="kv_head", **shape)
    views = [golden_view(method, tensors, layer=layer) for layer in range(layers)]
    kept = keep_of(method, views, budget)
    for layer in range(layers):
        same_places(method, f"pyramidkv_factory layer {layer}", kept[layer], tensors[f"kept_positions_layer{layer}"])
    for each, count in zip(kept, tensors["kept_count"].tolist(), strict=True):
        assert (each.sum(-1) == count).all()
    exact = build_eviction("pyramidkv", pool_per="kv_head", **shape)
    total_Bh = torch.stack(keep_of(exact, views, budget)).sum((0, -1))
    assert (total_Bh == layers * min(budget, views[0].entries_BN.shape[1])).all()


def test_golden_original_counts(shared):
    """But where it fails (-1): the exact pyramid is the same, or the original's total is more than the budget."""
    cases = table_cases(shared, "pyramidkv_factory_budgets")
    cases = {case: counts for case, counts in cases.items() if -1 not in counts}
    worst, surplus = 0, []
    for (length, capacity, window, beta, layers), counts in cases.items():
        budget = min(capacity, length)
        numbers = [column(value, layers) for value in (budget, length, window)]
        ours = original_pyramid(*numbers, beta)[:, 0].tolist()
        worst = max(worst, *(abs(our - its) for our, its in zip(ours, counts, strict=True)))
        exact = exact_pyramid(*numbers, beta)[:, 0].tolist()
        assert sum(exact) == budget * layers
        surplus.append(sum(counts) / (budget * layers))
        assert exact == counts or surplus[-1] > 1
    record("pyramidkv", f"pyramidkv_factory_budgets: counts of {sum(map(len, cases.values()))} rows", worst)
    assert worst == 0
    assert min(surplus) >= 1


def test_golden_kvpress_counts(shared):
    """All rows; the press rounds only the result, so its budgets may hold parts of an entry."""
    cases = table_cases(shared, "kvpress_pyramid_budgets")
    worst = 0
    for (length, ratio, window, beta, layers), counts in cases.items():
        numbers = [column(value, int(layers)) for value in (length * (1 - ratio), int(length), int(window))]
        ours = kvpress_pyramid(*numbers, int(beta))[:, 0].tolist()
        worst = max(worst, *(abs(our - its) for our, its in zip(ours, counts, strict=True)))
    record("pyramidkv", f"kvpress_pyramid_budgets: counts of {sum(map(len, cases.values()))} rows", worst)
    assert worst == 0


@st.composite
def equal_layers(draw):
    entries = draw(st.integers(1, 300))
    kept, window = draw(st.integers(1, entries)), draw(st.integers(0, min(entries, 70)))
    return kept, entries, window, draw(st.integers(1, 30)), draw(st.integers(1, 40))


@settings(deadline=None)
@given(equal_layers())
def test_exact_pyramid(case):
    budget, entries, window, beta, layers = case
    counts = exact_pyramid(*(column(value, layers) for value in (budget, entries, window)), beta)[:, 0].tolist()
    assert sum(counts) == budget * layers
    assert counts == sorted(counts, reverse=True)
    assert min(counts) >= 1
    assert max(counts) <= entries
    base = budget - window
    if base > 0:
        assert min(counts) >= window + base // beta
    if base <= 0 or entries < 2 * base or beta == 1:
        assert counts == [budget] * layers


def test_window_counts_only_where_it_competes():
    """With all of the window outside of what competes, the whole budget forms the pyramid."""
    method = build_eviction("pyramidkv", window=8)
    scores = [Scores(torch.zeros(1, 1, 60), torch.arange(60)[None] >= 52)] * 3
    candidates = Candidates([torch.full((1, 60), 2)] * 3, [torch.arange(60)[None] < 50] * 3, torch.full((3, 1), 20))
    assert method.counts(scores, candidates)[:, 0].tolist() == [39, 20, 1]
    window = [Scores(torch.zeros(1, 1, 60), torch.arange(60)[None] >= 45)] * 3
    assert method.counts(window, candidates)[:, 0].tolist() == [35, 20, 5]


ROWS = 200


@pytest.fixture(scope="module")
def backbone():
    return compress(text_family(layers=2), None, name="none").eval()


def windows_of(backbone, method, keep, monkeypatch, scope="all"):
    """Protected entries of every layer."""
    seen, best = [], base.keep_best_entries

    def recorded(scores_BhN, competes_BN, protected_BN, *rest):
        seen.append(int(protected_BN.sum()))
        return best(scores_BhN, competes_BN, protected_BN, *rest)

    monkeypatch.setattr(base, "keep_best_entries", recorded)
    prefill(backbone, text_batch([(ROWS // 2, ROWS // 2, 0)]), PackedCache(2), Compression(method, keep, scope=scope))
    return seen


@pytest.mark.parametrize(("keep", "rows"), [(0.01, 0), (0.05, 1), (0.1, 2), (0.2, 4)])
def test_a_tenth_of_the_budget_is_the_window(backbone, keep, rows, monkeypatch):
    """Of 2, 10, 20 and 40 entries: those that observe are 1 at least, and at 1 % one entry is still chosen."""
    for name in ("snapkv", "pyramidkv"):
        assert windows_of(backbone, build_eviction(name, window=0.1), keep, monkeypatch) == [max(rows, 1)] * 2
    for share in ({"window": 0.1}, {"recent_share": 0.1}):
        assert windows_of(backbone, build_eviction("h2o", **share), keep, monkeypatch) == [rows] * 2
    uniform = build_eviction("vl_cache", recent=0.1, budgets="uniform")
    assert windows_of(backbone, uniform, keep, monkeypatch) == [rows] * 2


def test_the_share_is_of_the_budget_in_scope(backbone, monkeypatch):
    """100 tokens of context compete: half of them is the budget, a fifth of that observes, out of the question."""
    assert windows_of(backbone, build_eviction("snapkv", window=0.2), 0.5, monkeypatch, scope="context") == [10, 10]


def test_chunks_need_a_number_of_rows():
    with pytest.raises(ValueError, match="of which a share says no number; leave one of them out, or give window"):
        Compression(build_eviction("snapkv", window=0.1), 0.5, prefill_chunk=16)


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
    """(scores [h, N], log preference) of one prompt without padding, in fp64, written out."""
    before, half = matrix.shape[-1] - window, method.kernel // 2
    seen = matrix.double()[:, before:, :before]
    mean = seen.sum(1) / window
    variance = (seen - mean[:, None]).square().sum(1) / max(window - 1, 1)
    value = mean + method.gamma * variance
    pooled = [value[:, max(0, i - half) : i + half + 1].sum(1) / method.kernel for i in range(before)]
    scores = [
        torch.stack(pooled, 1).view(prompt_views.KV_HEADS, -1, before).mean(1),
        torch.zeros(prompt_views.KV_HEADS, window),
    ]
    entropy, scattered, tiny = -(seen * (seen + 1e-10).log()).sum(), variance.sum(), torch.finfo(torch.float32).tiny
    preference = math.log(max(entropy, tiny)) / method.tau1 + math.log(max(scattered, tiny)) / method.tau2
    return torch.cat(scores, 1).float(), preference


@pytest.mark.parametrize("settings", [{}, {"gamma": 0.5, "kernel": 3, "tau1": 0.4, "tau2": 2.0}])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_shares_are_the_plain_reference(settings, pad):
    """A question in the window, one shorter than it, none, and one of a single row; rows that are no entries."""
    method = build_eviction("cake", window=4, **settings)
    view = prompt_views.layer_views(CODES, method.needs, pad, layers=1, dropped=[(0, 0.2)])[0]
    found = method.score(view.replaced(in_scope_BN=view.regions_BN == Region.CONTEXT))
    for (sample, entries, matrix, _, _), window in zip(prompt_views.samples(view), (4, 2, 4, 1), strict=True):
        expected, preference = plain(matrix, window, method)
        torch.testing.assert_close(found.scores_BhN[sample][:, entries], expected, rtol=1e-4, atol=1e-6)
        assert float(found.weight_B[sample]) == pytest.approx(preference, rel=1e-4)
        late = [place >= int(entries.sum()) - window for place in range(int(entries.sum()))]
        assert found.protected_BN[sample][entries].tolist() == late


def test_while_decoding_layers_keep_the_prompt_s_preferences():
    """Entries compete by the rows that are there; one row has no variance; heads with entries of their own alike."""
    method = build_eviction("cake", window=4, kernel=1)
    prompt = prompt_views.layer_views([[3] * 12], method.needs, layers=1)[0]
    first = method.score(prompt)
    assert first.carried.shape == (1, prompt_views.KV_HEADS, 12)
    query, key = prompt.query_BHNd[:, :, -1:], prompt.key_BhNd
    rows = {"place_BN": torch.arange(12)[None], "seen_B": torch.tensor([12])}
    given = (0, query, key, key, prompt.regions_BN, prompt.scale, method.needs)
    later = method.score(View(*given, carried=first.carried, heads=1, **rows))
    assert torch.equal(later.weight_B, first.weight_B)
    assert torch.equal(later.carried, first.carried)
    matrix = prompt_views.dense_attention(prompt.query_BHNd[0], key[0], [True] * 12, prompt.scale)[:, -1]
    torch.testing.assert_close(later.scores_BhN[0, :, :8], matrix.view(prompt_views.KV_HEADS, -1, 12).mean(1)[:, :8])
    apart = [each.transpose(0, 1).reshape(prompt_views.KV_HEADS, -1, *each.shape[2:]) for each in (query, key)]
    apart[0] = query[0].view(prompt_views.KV_HEADS, -1, *query.shape[2:])
    rows = {key: each.expand(prompt_views.KV_HEADS, *each.shape[1:]) for key, each in rows.items()}
    given = (0, *apart, apart[1], prompt.regions_BN.expand(prompt_views.KV_HEADS, -1), prompt.scale, method.needs)
    by_head = method.score(View(*given, carried=first.carried[0][:, None], heads=prompt_views.KV_HEADS, **rows))
    torch.testing.assert_close(by_head.scores_BhN[:, 0], later.scores_BhN[0])
    assert by_head.weight_B.tolist() == first.weight_B.tolist() * prompt_views.KV_HEADS


def claims(score, floor, budget, window):
    """(window, claim) of every head, in real numbers, before anything is rounded or cut off."""
    window = torch.minimum(window, budget)
    left, share = budget - window, score / score.sum() if score.any() else score
    return window, floor * left + (1 - floor) * share * left.sum()


@pytest.mark.parametrize(("name", "given"), [("headkv", {"floor": 0.2}), ("sparsemm", {})])
def test_sets_are_the_release_s_but_for_how_heads_are_rounded(tmp_path, name, given):
    """With its counts the sets are its own, where every head has keys; our counts are within one of them."""
    own = originals(name)
    layers, heads = own["kept"].shape[:2]
    score_Lh = own["score"].view(layers, heads, -1).sum(-1)  # sparsemm's file has one for each query head
    path = prompt_views.written(tmp_path / "heads.json", name, HeadScores(score_Lh.tolist()))
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
    wanted = sum(claims(score.double(), floor, budget, window))
    if score.any() and ((wanted >= 1) & (wanted <= most)).all():
        assert ((found[:, None] - wanted).abs() < 1).all()


def test_while_decoding_a_head_that_is_a_row_has_the_same_share():
    """Rows of the batch are heads of a sample then: the same numbers as heads of a layer."""
    method = build_eviction("headkv", window=3, **prompt_views.settings_for("headkv"))
    views = prompt_views.layer_views([[3] * 40, [3] * 23], method.needs, "left")
    scores, counts, _, candidates = prompt_views.plan(method, views, 0.3)

    def rows(tensor):
        return tensor.repeat_interleave(prompt_views.KV_HEADS, 0)

    apart = [
        Scores(x.scores_BhN.flatten(0, 1)[:, None], rows(x.protected_BN), notes={"head": x.notes["head"].view(-1, 1)})
        for x in scores
    ]
    lists = [list(map(rows, each)) for each in (candidates.regions_LBN, candidates.competes_LBN)]
    of_rows = Candidates(
        *lists, candidates.budget_LB.repeat_interleave(prompt_views.KV_HEADS, 1), heads=prompt_views.KV_HEADS
    )
    assert torch.equal(method.counts(apart, of_rows)[..., 0].view(prompt_views.LAYERS, 2, -1), counts)
    for view, both in zip(views, apart, strict=True):
        states = (
            view.query_BHNd.flatten(0, 1).unflatten(0, (-1, prompt_views.HEADS // prompt_views.KV_HEADS)),
            view.key_BhNd.flatten(0, 1)[:, None],
        )
        found = method.score(View(view.layer, *states, states[1], rows(view.regions_BN), view.scale, method.needs))
        assert torch.equal(found.notes["head"], both.notes["head"])
        torch.testing.assert_close(found.scores_BhN, both.scores_BhN)


def test_scores_that_are_none():
    for score, words in (([[0.0, 0.0]], "score is 0 for all heads"), ([[-1.0, 1.0]], r"score\[0\]\[0\] is -1")):
        refuses(words, HeadScores, score)
