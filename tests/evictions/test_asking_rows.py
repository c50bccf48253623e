"""The prompt's last row (TOVA), the question's (Finch), each step's (Quest) beside plain sums, and what is refused."""

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.queries import QuestSteps
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import open_prompts
from tests.support.prompt_views import KV_HEADS, layer_views, samples
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of

TWO = [[1] + [2] * 14 + [4] * 4, [4] * 9]
CODES = [[1] + [3] * 14 + [4] * 5, [3] * 6 + [4] * 3, [2] * 4 + [4] + [2] * 3 + [4]]


@pytest.mark.parametrize("protect_last", [False, True])
def test_tova_is_the_last_row(protect_last):
    method = build_eviction("tova", protect_last=protect_last)
    view = layer_views(TWO, method.needs, "left", layers=1, dropped=[(0, 0.3)])[0]
    found = method.score(view)
    for sample, entries, matrix, _, _ in samples(view):
        assert torch.allclose(found.scores_BhN[sample, 0, entries], matrix[:, -1].mean(0), atol=1e-6)
        assert found.protected_BN[sample, entries].tolist() == [False] * (len(matrix[0]) - 1) + [protect_last]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_finch_is_a_plain_sum(normalise, pad):
    """Three lengths, two images, rows that are no entries; question rows are what follows the context."""
    method = build_eviction("finch", normalise=normalise)
    view = layer_views(CODES, method.needs, pad, layers=1, dropped=[(0, 0.2)])[0]
    found = method.score(view)
    for (sample, entries, matrix, _, _), asking in zip(samples(view), (5, 3, 1), strict=True):
        length = matrix.shape[-1]
        asks = torch.arange(length) >= length - asking
        weight = torch.arange(1, length + 1) if normalise else torch.ones(length)
        expected = (matrix * (weight * asks)[:, None]).sum(1).view(KV_HEADS, -1, length).mean(1) / asking
        torch.testing.assert_close(found.scores_BhN[sample][:, entries], expected.masked_fill(asks, 0.0))
        assert found.protected_BN[sample, entries].tolist() == asks.tolist()


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


def test_the_first_layers_read_everything():
    assert [QuestSteps().pages(layer) for layer in range(4)] == [None, None, (16, 3), (16, 3)]
    assert QuestSteps(page_size=8, least_pages=1, dense_layers=0).pages(0) == (8, 1)


def test_tables_say_that_it_reads():
    assert Compression(QuestSteps(), 0.25).label == "quest_steps reads 0.25"
    assert Compression(QuestSteps(), 512, "tokens", "all").label == "quest_steps reads 512 tokens all"
