"""Rows unlike each other, beside loops and released code; density-peak clusters and leverage scores."""

from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from subtoken_train.evictions.keys import gaussian_sketch, leverage_scores
from subtoken_train.functional import diversity
from subtoken_train.functional.diversity import farthest_places, unit_rows, unlike_places, volume_places
from subtoken_train.reducers.embeds import relevance
from subtoken_train.reducers.staged import densities, density_clusters, distances
from subtoken_train.reducers.tower import important_and_distinct, principal_tokens
from tests.support.golden_cases import alike, load
from tests.support.helpers import random_mask, random_scores
from tests.support.plain_choices import by_determinants, by_max_min, clusters_by_loop, cosine, without_by_loop

SIZES, SEEDS = st.tuples(st.integers(1, 3), st.integers(1, 14)), st.integers(0, 10_000)


def chosen_order(place_N, steps):
    """Rows in the order of their places; all other places are ``steps``."""
    taken = sorted((place, row) for row, place in enumerate(place_N.tolist()) if place < steps)
    assert [place for place, _ in taken] == list(range(len(taken)))
    assert set(place_N.tolist()) - {place for place, _ in taken} <= {steps}
    return [row for _, row in taken]


@example(sizes=(1, 7), steps=1, seed=278)  # of two rows that are each other's nearest the first
@given(sizes=SIZES, steps=st.integers(1, 16), seed=SEEDS)
def test_farthest_rows_and_volumes_are_those_of_the_loops_in_every_sample(sizes, steps, seed):
    rows, marks = random_scores(seed, *sizes, 16), random_mask(seed + 1, *sizes)
    weights = random_scores(seed + 2, *sizes).abs() + 0.1
    places = farthest_places(unit_rows(rows), marks, steps), volume_places(unit_rows(rows), weights, marks, steps)
    for row_ND, weight_N, mark_N, far_N, volume_N in zip(rows, weights, marks, *places, strict=True):
        own = mark_N.nonzero()[:, 0]
        count = min(steps, len(own))
        unit = unit_rows(row_ND[own]).double()
        first = sorted(row.sort().values[-2:][0].item() for row in unit @ unit.T)  # likeness to the nearest other
        tied = len(own) > 1 and first[1] - first[0] < diversity.SAME  # each other's nearest: rounding decides
        assert tied or chosen_order(far_N, steps) == (own[by_max_min(row_ND[own], count)].tolist() if count else [])
        best = by_determinants(row_ND[own], weight_N[own].double(), count)
        assert chosen_order(volume_N, steps) == own[best].tolist()


@given(rows=st.integers(1, 40), share=st.floats(0, 1), seed=SEEDS)
def test_doubles_go_as_in_the_loops(rows, share, seed):
    states, count = random_scores(seed, rows, 6), max(1, int(rows * share))
    assert diversity.without_doubles(unit_rows(states), count).tolist() == without_by_loop(states, count)


@given(sizes=SIZES, pivots=st.integers(1, 4), seed=SEEDS)
def test_every_pivot_takes_its_quota_of_the_least_alike(sizes, pivots, seed):
    rows, marks = random_scores(seed, *sizes, 6), random_mask(seed + 1, *sizes)
    pivot_BP = random_scores(seed + 2, sizes[0], pivots, levels=sizes[1], dtype=torch.int64)
    quota_BP = random_scores(seed + 3, sizes[0], pivots, levels=5, dtype=torch.int64)
    places = unlike_places(unit_rows(rows), pivot_BP, marks, quota_BP, torch.zeros(sizes[0], 1).long(), sizes[1])
    for sample in range(sizes[0]):
        left, taken = marks[sample].nonzero()[:, 0].tolist(), []
        for pivot, quota in zip(pivot_BP[sample].tolist(), quota_BP[sample].tolist(), strict=True):
            like = {i: cosine(rows[sample, i], rows[sample, pivot]) for i in left}
            taken += sorted(left, key=lambda i, like=like: like[i])[:quota]
            left = [i for i in left if i not in taken]
        assert chosen_order(places[sample], sizes[1]) == taken


def test_ties_and_doubles_go_to_the_lower_index():
    """Axes that are all equally far, each twice; the doubles come when nothing else is left, in order."""
    rows, every = torch.eye(5)[[3, 1, 1, 3, 0]][None], torch.ones(1, 5, dtype=torch.bool)
    for places in (farthest_places(rows, every, 5), volume_places(rows, torch.ones(1, 5), every, 5)):
        first = chosen_order(places[0], 5)
        assert (sorted(first[:3]), first[3:]) == ([0, 1, 4], [2, 3])
    assert chosen_order(volume_places(rows, torch.ones(1, 5), every, 5)[0], 5)[:3] == [0, 1, 4]
    assert chosen_order(volume_places(rows, torch.tensor([[1.0, 1, 2, 1, 1]]), every, 1)[0], 1) == [2]


@pytest.mark.parametrize("choose", [farthest_places, lambda *a: volume_places(a[0], torch.ones(1, 30), *a[1:])])
def test_half_precision_is_chosen_among_in_fp32(choose):
    rows, marks = random_scores(0, 1, 30, 16, dtype=torch.bfloat16), torch.ones(1, 30, dtype=torch.bool)
    exact = choose(unit_rows(rows.float()), marks, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(choose(unit_rows(rows), marks, 8), exact)


@pytest.fixture(scope="module")
def originals():
    return load_file(Path(__file__).resolve().parents[2] / "benchmarks/results/pruner_originals.safetensors")


def marks(indices, count):
    return torch.zeros(len(indices), count, dtype=torch.bool).scatter(1, indices, True)


def test_divprune_is_the_originals_choice_in_its_order(originals):
    features, chosen = originals["divprune.features"], originals["divprune.chosen"]
    places = farthest_places(unit_rows(features), torch.ones(features.shape[:2]).bool(), chosen.shape[1])
    alike("divprune", "pruner_originals", places.argsort(dim=-1, stable=True)[:, : chosen.shape[1]], chosen)


def test_cdpruner_is_the_originals_set(originals):
    features, text, kept = (originals[f"cdpruner.{name}"] for name in ("features", "text", "kept"))
    images, tokens = features.shape[:2]
    rows, steps = unit_rows(torch.cat([features, text.expand(images, -1, -1)], 1)), int(kept[0].sum())
    visual = torch.arange(rows.shape[1]).expand(images, -1) < tokens
    places = volume_places(rows, relevance(rows, visual, ~visual), visual, steps)
    alike("cdpruner", "pruner_originals", places[:, :tokens] < steps, kept)


def test_dart_is_the_originals_set(originals):
    """The decoder's stage: four tokens of the image, then as many for each pivot, in the original's order of pivots."""
    states, keys, kept, pivots = (originals[f"dart.{name}"] for name in ("states", "keys", "kept", "pivots"))
    rows, start = states.shape[1], 5
    visual = ((torch.arange(rows) >= start) & (torch.arange(rows) < start + 60))[None]
    best = keys.abs().sum((1, 3)).masked_fill(~visual, 0)[0].topk(4).indices
    assert sorted(int(row) for row in pivots if visual[0, row]) == sorted(best.tolist())
    free, quota = visual & ~marks(best[None], rows), torch.full((1, 8), (len(kept) - 4) // 8)
    places = unlike_places(unit_rows(states), pivots[None], free, quota, torch.full((1, 1), 4), rows)
    alike("dart", "pruner_originals", (places < rows) | marks(best[None], rows), marks(kept[None], rows))


def test_vispruner_is_the_originals_set(originals):
    features, attention, kept = (originals[f"vispruner.{name}"] for name in ("features", "attention", "kept"))
    images = zip(features, attention.mean(1), strict=True)
    ours = torch.stack([important_and_distinct(*image, 8, 16) for image in images])
    alike("vispruner", "pruner_originals", marks(ours, features.shape[1]), kept)


def test_prunesid_is_the_originals_choice_in_its_order(originals):
    """Its random decomposition was run until the start no longer mattered."""
    images = list(zip(originals["vispruner.features"], originals["vispruner.attention"].sum(1), strict=True))
    for need in (16, 40):
        ours = torch.stack([principal_tokens(*image, need, 1) for image in images])
        alike("prunesid", "pruner_originals", ours, originals[f"prunesid.chosen{need}"].long())


def test_golden_of_sparsevlms_release(shared):
    params, tensors = load(shared, "sparsevlm")
    for points, noise, expected in zip(*(tensors[f"merge_{name}"] for name in ("in", "noise", "out")), strict=True):
        apart = distances(points)
        dense = densities(apart, params["cluster_num"]) + 1e-6 * noise
        _, cluster = density_clusters(apart, dense, params["cluster_num"])
        means = torch.stack([points[cluster == i].mean(0) for i in range(params["cluster_num"])])
        torch.testing.assert_close(means, expected, rtol=1e-4, atol=1e-5)


@given(st.integers(1, 14), st.integers(1, 14), st.integers(0, 200))
def test_clusters_equal_a_plain_loop(points, count, seed):
    drawn, count = random_scores(seed, points, 4), min(points, count)
    apart = distances(drawn)
    centres, cluster = density_clusters(apart, densities(apart, count), count)
    assert (centres.tolist(), cluster.tolist()) == clusters_by_loop(drawn, count)


def test_equal_points_cluster_by_their_order():
    apart = distances(torch.ones(5, 3))
    centres, cluster = density_clusters(apart, densities(apart, 2), 2)
    assert centres.tolist() == [0, 1]
    assert cluster.tolist() == [0, 1, 0, 0, 0]


def test_a_sketch_wider_than_the_vectors_and_vectors_of_large_size():
    """The Gram matrix is singular, and rounding exceeds the first jitter."""
    torch.manual_seed(0)
    for size in (1.0, 1e4):
        found = leverage_scores(torch.randn(2, 300, 8) * size, gaussian_sketch(2, 8, 48, 0))
        assert found.isfinite().all()
        assert (abs(found.sum(-1) - 8) < 0.5).all()
