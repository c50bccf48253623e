"""TOVA: equal to the released code and to the press; the last row alone observes."""

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.types import Region
from tests.support.golden_cases import close, golden_view, load, same_sets
from tests.support.prompt_views import DenseView, dense_attention, layer_views


def test_golden_original(shared):
    _, tensors = load(shared, "tova_original")
    method = build_eviction("tova")
    attention = tensors["attention"]
    view = DenseView(attention, torch.full(attention.shape[::3], int(Region.QUERY)), method.needs, tensors["values"])
    same_sets(method, "tova_original", view, tensors["kept_positions"])


def test_golden_press(shared):
    """The press scores the last entry above all others, where here it is protected."""
    _, tensors = load(shared, "kvpress_tova")
    method = build_eviction("tova", protect_last=True)
    view = golden_view(method, tensors)
    ours, theirs = method.score(view).scores_BhN.expand_as(tensors["scores"]), tensors["scores"]
    close(method, "kvpress_tova: scores", ours[..., :-1], theirs[..., :-1])
    same_sets(method, "kvpress_tova", view, tensors["kept_positions"])


@pytest.mark.parametrize("protect_last", [False, True])
def test_equal_to_the_plain_reference(protect_last):
    """Left padding, two lengths, rows that are no entries; one set for all heads."""
    method = build_eviction("tova", protect_last=protect_last)
    view = layer_views([[1] + [2] * 14 + [4] * 4, [4] * 9], method.needs, "left", layers=1, dropped=[(0, 0.3)])[0]
    found = method.score(view)
    assert found.scores_BhN.shape[1] == 1
    for sample in range(2):
        entries = view.entries_BN[sample]
        query, key = view.query_BHNd[sample][:, entries], view.key_BhNd[sample][:, entries]
        last = dense_attention(query, key, [True] * len(query[0]), view.scale)[:, -1]
        assert torch.allclose(found.scores_BhN[sample, 0, entries], last.mean(0), atol=1e-6)
        ends = [False] * (len(query[0]) - 1) + [protect_last]
        assert found.protected_BN[sample, entries].tolist() == ends
