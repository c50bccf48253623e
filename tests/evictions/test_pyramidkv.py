"""PyramidKV: both codes' budgets, row by row; the exact pyramid's total, limits and shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.snapkv import exact_pyramid, kvpress_pyramid, original_pyramid
from subtoken_train.view.scores import Candidates, Scores
from tests.support.golden_cases import golden_view, keep_of, load, record, same_places


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
    """All rows; and where the original's total is the budget, the exact pyramid is the same one.

    Where its total is more, which is why it is not the default, the exact pyramid still meets the budget. Where the
    original fails (-1), there is nothing to compare.
    """
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


@pytest.mark.parametrize(("length", "capacity", "window", "layers"), [(37, 17, 5, 3), (200, 64, 8, 5), (30, 26, 5, 4)])
def test_the_original_s_line_by_whole_number_steps(length, capacity, window, layers):
    base = capacity - window
    most = min(2 * base - base // 20, length - window)
    least = 2 * base - most if most == length - window else base // 20
    line = [most - layer * ((most - least) // (layers - 1)) + window for layer in range(layers)]
    expected = [capacity] * layers if length < 2 * base else line
    ours = original_pyramid(*(column(value, layers) for value in (capacity, length, window)), 20)
    assert ours[:, 0].tolist() == expected


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


@pytest.mark.slow
@settings(deadline=None)
@given(st.data())
def test_exact_pyramid_of_unequal_layers(data):
    """Layers of a shortened model: each has its own entries, budget and window, and two samples do not mix."""
    layers = data.draw(st.integers(1, 12))
    numbers = []
    for _ in range(2):
        entries = data.draw(st.lists(st.integers(1, 60), min_size=layers, max_size=layers))
        budget = [data.draw(st.integers(1, most)) for most in entries]
        window = [data.draw(st.integers(0, most)) for most in entries]
        numbers.append(torch.tensor([budget, entries, window]))
    together = exact_pyramid(*torch.stack(numbers, -1), 20)
    for sample, (budget, entries, window) in enumerate(numbers):
        counts = together[:, sample]
        assert counts.sum() == budget.sum()
        assert ((counts >= 1) & (counts <= entries)).all()
        assert torch.equal(counts, exact_pyramid(budget[:, None], entries[:, None], window[:, None], 20)[:, 0])


@pytest.mark.parametrize("budgets", ["exact", "original", "kvpress"])
def test_one_layer_has_no_pyramid(budgets):
    method = build_eviction("pyramidkv", budgets=budgets, window=4)
    entries = torch.ones(1, 30, dtype=torch.bool)
    scores = [Scores(torch.zeros(1, 1, 30), torch.arange(30)[None] >= 26)]
    assert method.counts(scores, Candidates([entries.long()], [entries], torch.tensor([[10]]))).tolist() == [[10]]


def test_window_counts_only_where_it_competes():
    """With all of the window outside of what competes, the whole budget forms the pyramid."""
    competes = torch.arange(60)[None] < 50
    method = build_eviction("pyramidkv", window=8)
    scores = [Scores(torch.zeros(1, 1, 60), torch.arange(60)[None] >= 52)] * 3
    budget = torch.full((3, 1), 20)
    candidates = Candidates([torch.full((1, 60), 2)] * 3, [competes] * 3, budget)
    assert method.counts(scores, candidates)[:, 0].tolist() == [39, 20, 1]
    window = [Scores(torch.zeros(1, 1, 60), torch.arange(60)[None] >= 45)] * 3
    assert method.counts(window, candidates)[:, 0].tolist() == [35, 20, 5]
