"""Density-peak clusters against a plain loop and SparseVLM's release, whose noise on densities is given here."""

import json

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from subtoken_train.reducers.sparsevlm import densities, density_clusters, distances
from tests.support.helpers import random_scores
from tests.support.plain_choices import clusters_by_loop


def test_golden_of_sparsevlms_release(shared):
    folder = shared / "golden" / "sparsevlm"
    tensors = load_file(folder / "set_a.safetensors")
    params = json.loads((folder / "set_a.json").read_text())["params"]
    for points, noise, expected in zip(*(tensors[f"merge_{name}"] for name in ("in", "noise", "out")), strict=True):
        apart = distances(points)
        dense = densities(apart, params["cluster_num"]) + 1e-6 * noise
        _, cluster = density_clusters(apart, dense, params["cluster_num"])
        means = torch.stack([points[cluster == i].mean(0) for i in range(params["cluster_num"])])
        torch.testing.assert_close(means, expected, rtol=1e-4, atol=1e-5)


@given(st.integers(1, 14), st.integers(1, 14), st.integers(0, 200))
@settings(max_examples=40, deadline=None)
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
