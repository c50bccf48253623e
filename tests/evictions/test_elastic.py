"""Elastic Cache's scores and sets: by hand, and what the release keeps instead (``argsort`` taken for a rank)."""

import torch

from subtoken_train.evictions.elastic import Elastic
from subtoken_train.types import Region
from tests.support.golden_cases import close, keep_of, load
from tests.support.prompt_views import PROMPTS, DenseView, dense_attention, layer_views


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


def test_the_release_keeps_entries_by_chance():
    """Where scores do not go with the place, a fifth that it keeps holds a fifth of the best."""
    scores = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    kept = as_released(scores, len(scores), 0.8)
    best = scores.topk(len(kept)).indices
    assert 0.15 < torch.isin(kept, best).float().mean() < 0.25


def test_scores_by_hand():
    """A plain loop over rows and heads; the ends of every sample are protected, whatever the padding."""
    method = Elastic(sinks=2, recent=3)
    for pad in ("left", "right"):
        views = layer_views(list(PROMPTS.values()), method.needs, pad)
        for view in views:
            found = method.score(view)
            for sample, entries in enumerate(view.entries_BN):
                matrix = dense_attention(view.query_BHNd[sample], view.key_BhNd[sample], entries, view.scale)
                expected = torch.stack([matrix[:, row].mean(0) for row in range(len(entries)) if entries[row]]).sum(0)
                torch.testing.assert_close(found.scores_BhN[sample, 0][entries], expected[entries])
                places = entries.nonzero()[:, 0].tolist()
                protected = found.protected_BN[sample].nonzero()[:, 0].tolist()
                assert protected == sorted({*places[:2], *places[-3:]})
