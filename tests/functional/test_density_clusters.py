"""Density-peak clusters beside a loop and SparseVLM's release, and leverage scores beside the projection's diagonal."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evictions.compactor import JITTER, gaussian_sketch, leverage_scores, standardised
from subtoken_train.reducers.sparsevlm import densities, density_clusters, distances
from tests.support.golden_cases import load
from tests.support.helpers import random_scores
from tests.support.plain_choices import clusters_by_loop


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


def test_equal_to_the_diagonal_of_the_projection():
    torch.manual_seed(0)
    vectors, sketch = torch.randn(2, 40, 8), gaussian_sketch(2, 8, 5, 0)
    found = leverage_scores(vectors, sketch)
    for head in range(2):
        x = ((vectors[head] - vectors[head].mean(0)) @ sketch[head]).double()
        projection = x @ torch.linalg.inv(x.T @ x + JITTER * torch.eye(5)) @ x.T
        assert torch.allclose(found[head].double(), projection.diagonal(), atol=1e-5)
    assert (found >= 0).all()


def test_a_sketch_wider_than_the_vectors_and_vectors_of_large_size():
    """The Gram matrix is singular, and rounding exceeds the first jitter."""
    torch.manual_seed(0)
    for size in (1.0, 1e4):
        found = leverage_scores(torch.randn(2, 300, 8) * size, gaussian_sketch(2, 8, 48, 0))
        assert found.isfinite().all()
        assert (abs(found.sum(-1) - 8) < 0.5).all()


def test_one_vector_has_none():
    assert leverage_scores(torch.randn(2, 1, 8), gaussian_sketch(2, 8, 4, 0)).tolist() == [[0.0], [0.0]]


def test_standardised():
    values = torch.randn(2, 30) * 3 + 7
    found = standardised(values)
    assert torch.allclose(found, (values - values.mean()) / values.std(), atol=1e-5)
    assert standardised(torch.full((2, 3), 5.0)).tolist() == [[0.0] * 3] * 2
    assert standardised(torch.tensor([[4.0]])).tolist() == [[0.0]]
