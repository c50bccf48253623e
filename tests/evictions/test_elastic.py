"""Elastic Cache's scores and sets, which are not the release's; PrefixKV's layer budgets beside a search."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evictions.base import keep_best_entries
from subtoken_train.evictions.h2o import Elastic, PrefixKV, prefix_counts, prefix_curve
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from tests.support.golden_cases import close, keep_of, load, record, same_places
from tests.support.prompt_views import PROMPTS, DenseView, layer_views, samples


def golden_views(tensors, method):
    """The recorded layers, one sample."""
    return [
        DenseView(attention[None], torch.full((1, attention.shape[-1]), int(Region.QUERY)), method.needs)
        for attention in tensors["attentions"]
    ]


def test_scores_are_the_release_s_and_its_sets_are_not(shared):
    params, tensors = load(shared, "elasticcache_as_released")
    method, length, start = Elastic(), params["T"], params["start_size"]
    views = golden_views(tensors, method)
    differing = []
    for layer, view in enumerate(views):
        scores = method.score(view).scores_BhN[0, 0]
        close(method, "elasticcache_as_released: scores", scores, tensors["score_sum"][layer])
        count = tensors[f"keys_out_layer{layer}"].shape[2]
        kept = keep_of(method, [view], count)[0][0, 0]
        ranked = scores[start:-1].sort(descending=True).indices[: count - 2] + start
        assert set(kept.nonzero()[:, 0].tolist()) == {0, length - 1, *ranked.tolist()}
        released = as_released(tensors["score_sum"][layer, start:-1], length, params["ratio"]) + start
        differing.append(set(released.tolist()) ^ set(ranked.tolist()))
    assert all(differing), "the release's sets are those of the best scores: its bug is gone"


def as_released(scores, length, ratio):
    """Places that the release keeps: an index that ``argsort`` gives, compared as if it were a rank."""
    return (scores.argsort() > int(length - length * (1 - ratio))).nonzero()[:, 0]


def test_scores_by_hand():
    """A plain loop over rows and heads; the ends of every sample are protected, whatever the padding."""
    method = Elastic(sinks=2, recent=3)
    for pad in ("left", "right"):
        views = layer_views(list(PROMPTS.values()), method.needs, pad)
        for view in views:
            found = method.score(view)
            for sample, entries, matrix, _, _ in samples(view):
                torch.testing.assert_close(found.scores_BhN[sample, 0][entries], matrix.mean(0).sum(0))
                places = entries.nonzero()[:, 0].tolist()
                protected = found.protected_BN[sample].nonzero()[:, 0].tolist()
                assert protected == sorted({*places[:2], *places[-3:]})


CASES = ["prefixkv_ratio0.3", "prefixkv_ratio0.7"]


def counts_by_level(curves, total, protected, most):
    """The highest level of all curves' values whose prefixes cost no more; what is left, one at a time by level."""

    def at(level):
        return [
            min(most[layer], protected[layer] + 1 + sum(value < level for value in curve))
            for layer, curve in enumerate(curves)
        ]  # fmt: skip

    levels = [*sorted({value for curve in curves for value in curve}), 2.0]
    best = max((level for level in levels if sum(at(level)) <= total), default=None)
    return None if best is None else at(best)


@pytest.mark.parametrize("case", CASES)
def test_prefixes_are_the_release_s_at_its_level(shared, case):
    params, tensors = load(shared, case)
    method = PrefixKV()
    views = golden_views(tensors, method)
    scores, length = [method.score(view) for view in views], params["T"]
    whole = torch.ones(1, length, dtype=torch.bool)
    curves = [prefix_curve(each.scores_BhN[:, 0], whole) for each in scores]
    protected = torch.full((len(views), 1), params["start_size"] + params["protect_size"])
    most = torch.full((len(views), 1), length)
    raw = length - tensors["raw_forget_nums"]
    ours = prefix_counts(curves, raw.sum()[None], protected, most)
    record(method.name, f"{case}: counts at its level", int((ours[:, 0] - raw).abs().max()))
    assert ours[:, 0].tolist() == raw.tolist()
    # the release's level misses the budget, and rounding down does too; ours meets it
    exact = method.counts(scores, Candidates([v.regions_BN for v in views], [whole] * len(views), most // 2))
    assert int(exact.sum()) == int((most // 2).sum())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix", ["", "conf_"])
def test_kept_sets_are_the_release_s_at_its_counts(shared, case, prefix):
    _, tensors = load(shared, case)
    method = PrefixKV()
    for layer, view in enumerate(golden_views(tensors, method)):
        places = tensors[f"{prefix}kept_positions_layer{layer}"]
        scores = method.score(view)
        kept = keep_best_entries(scores.scores_BhN, view.entries_BN, scores.protected_BN, torch.tensor([len(places)]))
        same_places(method, f"{case} {prefix}layer {layer}", kept, places[None, None])


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 60), st.integers(0, 3))
def test_counts_equal_a_search_of_the_level(seed, layers, total, protected):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(protected + 1, 16, (layers,), generator=generator).tolist()
    curves = [prefix_curve(torch.rand(1, n, generator=generator), torch.ones(1, n, dtype=torch.bool)) for n in lengths]
    most = torch.tensor(lengths)[:, None]
    found = prefix_counts(curves, torch.tensor([total]), torch.full_like(most, protected), most)[:, 0].tolist()
    assert sum(found) == min(max(total, layers), sum(lengths))
    assert all(1 <= count <= length for count, length in zip(found, lengths, strict=True))
    expected = counts_by_level([curve[0].tolist() for curve in curves], total, [protected] * layers, lengths)
    if expected is not None:
        missing = total - sum(expected)
        more = [count - other for count, other in zip(found, expected, strict=True)]
        assert min(more) >= 0 or sum(lengths) <= total
        assert sum(more) == min(missing, sum(lengths) - sum(expected))


def test_equal_curves_share_equally_and_ties_go_to_the_lower_layer():
    scores = torch.tensor([[4.0, 3, 2, 1, 1, 1]])
    whole = torch.ones_like(scores, dtype=torch.bool)
    curves = [prefix_curve(scores, whole)] * 3
    six = torch.full((3, 1), 6)
    assert prefix_counts(curves, torch.tensor([11]), six * 0, six)[:, 0].tolist() == [4, 4, 3]


def test_attention_of_nothing_is_an_even_budget_and_no_division_by_zero():
    whole, ten = torch.ones(1, 10, dtype=torch.bool), torch.full((2, 1), 10)
    curves = [prefix_curve(torch.zeros(1, 10), whole)] * 2
    assert prefix_counts(curves, torch.tensor([10]), ten * 0, ten).sum() == 10
