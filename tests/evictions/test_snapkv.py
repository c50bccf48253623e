"""SnapKV beside a plain reference, PyramidKV's budgets, windows as a share of the budget."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import base, build_eviction
from subtoken_train.evictions.snapkv import exact_pyramid, kvpress_pyramid, original_pyramid
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import prefill
from subtoken_train.view.scores import Candidates, Scores
from tests.support.golden_cases import close, golden_view, keep_of, load, record, same_places
from tests.support.helpers import compress
from tests.support.prompt_views import layer_views, samples
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
        expected = plain_scores(matrix, len(key), method)
        assert torch.allclose(found.scores_BhN[sample][:, entries], expected, atol=1e-6)
        late = [index >= length - window for index in range(length)]
        assert found.protected_BN[sample][entries].tolist() == late
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
    return (
        draw(st.integers(1, entries)),
        entries,
        draw(st.integers(0, min(entries, 70))),
        draw(st.integers(1, 30)),
        draw(st.integers(1, 40)),
    )


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
    competes = torch.arange(60)[None] < 50
    method = build_eviction("pyramidkv", window=8)
    scores = [Scores(torch.zeros(1, 1, 60), torch.arange(60)[None] >= 52)] * 3
    candidates = Candidates([torch.full((1, 60), 2)] * 3, [competes] * 3, torch.full((3, 1), 20))
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
    prompts = text_batch([(ROWS // 2, ROWS // 2, 0)])
    prefill(backbone, prompts, PackedCache(2), Compression(method, keep, scope=scope))
    return seen


@pytest.mark.parametrize(("keep", "rows"), [(0.01, 0), (0.05, 1), (0.1, 2), (0.2, 4)])
def test_a_tenth_of_the_budget_is_the_window(backbone, keep, rows, monkeypatch):
    """Of 2, 10, 20 and 40 entries: those that observe are 1 at least, and at 1 % one entry is still chosen."""
    for name in ("snapkv", "pyramidkv"):
        method = build_eviction(name, window=0.1)
        assert windows_of(backbone, method, keep, monkeypatch) == [max(rows, 1)] * 2
    for share in ({"window": 0.1}, {"recent_share": 0.1}):
        assert windows_of(backbone, build_eviction("h2o", **share), keep, monkeypatch) == [rows] * 2
    uniform = build_eviction("vl_cache", recent=0.1, budgets="uniform")
    assert windows_of(backbone, uniform, keep, monkeypatch) == [rows] * 2


def test_the_share_is_of_the_budget_in_scope(backbone, monkeypatch):
    """100 tokens of context compete: half of them is the budget, a fifth of that observes, out of the question."""
    method = build_eviction("snapkv", window=0.2)
    assert windows_of(backbone, method, 0.5, monkeypatch, scope="context") == [10, 10]


def test_chunks_need_a_number_of_rows():
    with pytest.raises(ValueError, match="of which a share says no number; leave one of them out, or give window"):
        Compression(build_eviction("snapkv", window=0.1), 0.5, prefill_chunk=16)
