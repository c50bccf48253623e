"""Finch: a plain reference, what a row's weight does, and prompts that ask nothing."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import open_prompts
from tests.support.prompt_views import KV_HEADS, DenseView, dense_attention, layer_views
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of

CODES = [[1] + [3] * 14 + [4] * 5, [3] * 6 + [4] * 3, [2] * 4 + [4] + [2] * 3 + [4]]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_equal_to_the_plain_reference(normalise, pad):
    """Three lengths, two images, rows that are no entries; question rows are what follows the context."""
    method = build_eviction("finch", normalise=normalise)
    view = layer_views(CODES, method.needs, pad, layers=1, dropped=[(0, 0.2)])[0]
    found = method.score(view)
    for sample, asking in enumerate((5, 3, 1)):
        entries = view.entries_BN[sample]
        query, key = view.query_BHNd[sample][:, entries], view.key_BhNd[sample][:, entries]
        matrix, length = dense_attention(query, key, [True] * len(query[0]), view.scale), len(query[0])
        group = len(matrix) // KV_HEADS
        for head in range(KV_HEADS):
            for place in range(length):
                total = sum(
                    float(matrix[own, row, place]) * (row + 1 if normalise else 1)
                    for own in range(head * group, (head + 1) * group)
                    for row in range(length - asking, length)
                )
                expected = 0 if place >= length - asking else total / asking / group
                assert float(found.scores_BhN[sample, head, entries][place]) == pytest.approx(expected, abs=1e-5)
        assert found.protected_BN[sample, entries].tolist() == [place >= length - asking for place in range(length)]


def test_a_row_that_sees_more_counts_more():
    """Entry 0 has all of the first asking row's attention, entry 1 of the second's: by weight 1 wins, else a tie."""
    attention = torch.zeros(1, 2, 4, 4)
    attention[:, :, 2, 0] = attention[:, :, 3, 1] = 1
    regions = torch.tensor([[3, 3, 4, 4]])
    for normalise, expected in ((True, [1.5, 2.0]), (False, [0.5, 0.5])):
        method = build_eviction("finch", normalise=normalise)
        view = DenseView(attention, regions, method.needs)
        assert method.score(view).scores_BhN[0, 0, :2].tolist() == expected


def test_prompts_that_ask_nothing_are_refused():
    method = build_eviction("finch")
    for notation in ("finch", "ada(finch)"):
        assert build_eviction(notation).reads_question
    cell = {**PLAIN_CELL, "family": "llava", "eviction": "finch", "scope": "context", "batch": "last_left"}
    backbone = backbone_of(cell)
    cache = PackedCache(backbone.family.shape.num_layers)
    with pytest.raises(ValueError, match=r"'finch' scores by the question after the context and '.*' ends with its"):
        open_prompts(backbone, batch_of(cell), cache, Compression(method, 0.5), "query_aware")
    asked = batch_of({**cell, "batch": "three_left"})
    with pytest.raises(ValueError, match=r"context_first compresses before .* eviction 'finch' scores by the question"):
        open_prompts(backbone, asked, cache, Compression(method, 0.5), "context_first")
