"""The contract of evictions, and budgets: divided by claims, from one pool, spent exactly by every method."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from subtoken_train.evictions import EVICTIONS, build_eviction
from subtoken_train.evictions.base import keep_best_entries
from subtoken_train.evictions.budgets import divide_budget, pooled_counts
from subtoken_train.evictions.observers import task_rows, unasked
from subtoken_train.types import Region
from subtoken_train.view.view import View
from tests.support.prompt_views import EXTREME, PROMPTS, by_head, candidates_of, draw_scores, layer_views, settings_for
from tests.support.refusals import refuses


def view_of(regions, needs=(), dtype=torch.float32):
    regions = torch.tensor(regions)
    batch, length = regions.shape
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(batch, heads, length, 4, generator=generator).to(dtype) for heads in (4, 2, 2)]
    return View(0, *tensors, regions, 0.5, frozenset(needs))


def plain_best(scores, competes, protected, count):
    """Kept places of one head."""
    able = [place for place, able in enumerate(competes) if able]
    always = sorted((place for place in able if protected[place]), reverse=True)
    others = sorted((place for place in able if not protected[place]), key=lambda place: (-scores[place], place))
    return set((always + others)[: max(count, 1)])


@st.composite
def choices(draw):
    scores, competes, protected = draw_scores(draw, 2, 10, EXTREME)
    batch, _, length = scores.shape
    counts = draw(st.lists(st.integers(0, length + 2), min_size=batch, max_size=batch))
    return scores, competes, protected, torch.tensor(counts)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(choices())
def test_best_entries_are_the_plain_ones(choice):
    scores, competes, protected, counts = choice
    kept = keep_best_entries(*choice)
    assert kept.dtype == torch.bool
    for sample, count in enumerate(counts.tolist()):
        for head, row in enumerate(scores[sample].tolist()):
            expected = plain_best(row, competes[sample], protected[sample], count)
            assert set(kept[sample, head].nonzero()[:, 0].tolist()) == expected


def test_a_score_that_is_no_number_is_a_fault():
    everything = torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(AssertionError):
        keep_best_entries(torch.tensor([[[0.0, torch.nan]]]), everything, everything, torch.tensor([1]))


@pytest.mark.parametrize("window", [1, 3, 9])
def test_last_rows(window):
    """Left, right and inner padding, fewer entries than the window, none at all."""
    regions = [[0, 0, 1, 2, 4, 4], [1, 2, 2, 4, 0, 0], [1, 0, 2, 0, 4, 4], [0, 0, 0, 4, 0, 0], [0] * 6]
    for row, codes in zip(view_of(regions).last_rows(window).tolist(), regions, strict=True):
        entries = [place for place, code in enumerate(codes) if code][-window:]
        assert row == [-1] * (window - len(entries)) + entries


def test_only_what_was_declared_is_given():
    view = view_of([[1, 2, 4]])
    index, rows = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)
    asked = {"rows": lambda: view.rows(index), "blocks": lambda: view.blocks(rows), "values": lambda: view.value_BhNd}
    asked |= {"key_norms": view.key_norms, "value_norms": view.value_norms}
    for need, ask in asked.items():
        refuses(rf"did not ask for it: add '{need}' to the method's needs", ask)
    assert view.query_BHNd.shape == (1, 4, 3, 4)
    assert view_of([[1, 2, 4]], ["values"]).value_BhNd.shape == (1, 2, 3, 4)
    assert view_of([[1, 2, 4]], ["value_norms"]).value_BhNd.shape == (1, 2, 3, 4)


LAYER = st.tuples(st.integers(0, 9), st.integers(0, 6), st.integers(0, 30))


def divide_plainly(layers, total):
    """One sample, in fractions: layers are (weight, least, most); those at a bound leave one after the other."""
    least = [min(low, most) for _, low, most in layers]
    most = [high for _, _, high in layers]
    total = min(max(total, sum(least)), sum(most))
    peak = max(weight for weight, _, _ in layers)
    faint = Fraction(peak, 10**9) if peak else Fraction(1)
    weights = [max(Fraction(weight), faint) for weight, _, _ in layers]

    def shares(factor):
        return [min(max(factor * w, low), high) for w, low, high in zip(weights, least, most, strict=True)]

    bends = sorted({Fraction(b) / w for w, low, high in zip(weights, least, most, strict=True) for b in (low, high)})
    factor = bends[0]
    for low, high in itertools.pairwise(bends):
        if sum(shares(low)) <= total <= sum(shares(high)):
            slope = (sum(shares(high)) - sum(shares(low))) / (high - low)
            factor = low + (total - sum(shares(low))) / slope if slope else low
            break
    real = shares(factor)
    counts = [int(share) for share in real]
    for i in sorted(range(len(real)), key=lambda i: (-round((real[i] - counts[i]) * 10**6), i))[: total - sum(counts)]:
        counts[i] += 1
    return counts


@given(st.lists(LAYER, min_size=1, max_size=7), st.integers(0, 120))
def test_equals_fractions(layers, total):
    weight, least, most = (torch.tensor(column)[:, None] for column in zip(*layers, strict=True))
    found = divide_budget(weight.float(), torch.tensor([total]), least, most)[:, 0].tolist()
    assert found == divide_plainly(layers, total)


def plain_pool(curves, total, lower_bound):
    """Counts of one sample's runs: one entry after the other joins."""
    entries = [
        (rank > 0 or not lower_bound, rank >= lower_bound, -value, run, rank)
        for run, values in enumerate(curves)
        for rank, value in enumerate(values)
    ]
    chosen = [run for *_, run, _ in sorted(entries)[:total]]
    return [chosen.count(run) for run in range(len(curves))]


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=5), st.integers(0, 24), st.integers(0, 3))
@example([[5, 5], [1]], 2, 2)  # every run first
def test_pooled_counts(curves, total, lower_bound):
    curves = [sorted(values, reverse=True) for values in curves]
    padded = torch.full((1, len(curves), 6), -torch.inf)
    for run, values in enumerate(curves):
        padded[0, run, : len(values)] = torch.tensor(values, dtype=torch.float32)
    counts = pooled_counts(padded, torch.tensor([total]), lower_bound)[0].tolist()
    assert counts == plain_pool(curves, total, lower_bound)
    assert sum(counts) == min(total, sum(map(len, curves)))


SETTINGS = {
    "per_layer": {"shares": (3, 1, 2)},
    "duo_attention": {"sinks": 1, "recent": 3},
    "lagkv": {"sinks": 1, "lag": 4},
    "simlayerkv": {"sinks": 1, "recent": 3},
}
CHAINS = [
    "ada(critical(knorm))",
    "ada(pyramidkv)",
    "chunk(knorm)",
    "chunk(pyramidkv)",
    "per_layer(ada(vl_cache))",
    "lkv(knorm)",
]
METHODS = [name for name in EVICTIONS if name != "quest_steps"] + CHAINS + ["chunk(snapkv)", "critical(h2o)"]
LENGTHS = (1, 2, 3, 5, 7, 16, 17, 31, 64, 65, 127, 199)


@pytest.mark.parametrize("name", METHODS)
def test_all_of_a_budget_is_spent_and_nothing_more(name):
    """Methods' windows, pages, chunks and pyramids shrink to the budget; what heads share counts for each of them."""
    method = build_eviction(name, **{
        f"{part}.{key}": value for part in name.replace(")", "").split("(")
        for key, value in SETTINGS.get(part, {}).items()
    }, **settings_for(name))  # fmt: skip
    body = [Region.VISUAL] if method.needs_image else [Region.CONTEXT]
    prompts = [[int(code) for code in [Region.SYSTEM, *body * length, Region.QUERY]] for length in LENGTHS]
    views = layer_views(prompts, method.needs, "left")
    scores = [method.score(view) for view in views]
    for keep in (0.004, 0.125, 0.3, 0.5, 0.99):
        candidates = candidates_of(method, views, keep)
        counts, kept = by_head(method.counts(scores, candidates)), method.keep(scores, candidates)
        heads = counts.shape[-1]
        assert counts.sum((0, 2)).tolist() == (candidates.budget_LB.sum(0) * heads).tolist()
        if not method.across_layers:  # every layer has its own budget
            assert counts.sum(-1).tolist() == (candidates.budget_LB * heads).tolist()
        for layer, competes_BN in enumerate(candidates.competes_LBN):
            assert ((kept[layer] & competes_BN[:, None]).sum(-1) == counts[layer]).all()


EXPECTED = {
    "text before and after": range(23, 29),
    "two images": range(22, 27),
    "one text token after": [17],
    "image last": [14],
    "no image": range(14),
    "context": range(18, 25),
}


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("shift", [0, 4])
def test_task_rows(name, shift):
    regions = torch.tensor([[0] * shift + PROMPTS[name] + [0] * 3])
    assert (task_rows(regions)[0].nonzero()[:, 0] - shift).tolist() == list(EXPECTED[name])


def test_prompts_without_a_question():
    width = max(map(len, PROMPTS.values()))
    for left in (0, 1):
        codes = [[0] * left * (width - len(x)) + x + [0] * (1 - left) * (width - len(x)) for x in PROMPTS.values()]
        assert unasked(torch.tensor(codes)).tolist() == [name == "image last" for name in PROMPTS]
    assert not unasked(torch.zeros(1, 3, dtype=torch.long)).any()
