"""One budget for all heads of all layers: the best triples of a sample, whatever the base."""

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.kvzip import KVzip
from subtoken_train.view.scores import Candidates, Scores
from tests.support.helpers import random_scores
from tests.support.prompt_views import PROMPTS, candidates_of, layer_views


def kept_of(notation, keep, prompts=("context",), **settings):
    method = build_eviction(notation, **settings)
    views = layer_views([PROMPTS[name] for name in prompts], method.needs)
    candidates = candidates_of(method, views, keep)
    scores = [method.score(view) for view in views]
    return method, scores, candidates, method.keep(scores, candidates)


def plain_triples(scores, candidates, total):
    """Triples of one sample that stay: each head's first, then the best of all that are left."""
    order = []
    for layer, own in enumerate(scores):
        for place in candidates.competes_LBN[layer][0].nonzero()[:, 0].tolist():
            safe = bool(own.protected_BN[0, place])  # these are alike, and the latest of a head comes first
            for head, score in enumerate(own.scores_BhN[0, :, place].tolist()):
                order.append((-torch.inf, layer, head, -place) if safe else (-score, layer, head, place))
    triples = [(layer, head, abs(place)) for _, layer, head, place in sorted(order)]
    firsts = list({triple[:2]: triple for triple in reversed(triples)}.values())
    others = [triple for triple in triples if triple not in firsts]
    return set([*firsts, *others][:total])


@pytest.mark.parametrize("keep", [0.1, 0.4, 1.0])
@pytest.mark.parametrize(("base", "settings"), [("knorm", {}), ("snapkv", {"window": 3}), ("streaming_llm", {})])
def test_the_best_of_all_layers_and_heads_stay(base, settings, keep):
    _, scores, candidates, kept = kept_of(f"pooled({base})", keep, **settings)
    competes = candidates.competes_LBN
    total = int(candidates.budget_LB.sum()) * scores[0].scores_BhN.shape[1]
    found = {
        (layer, head, place)
        for layer, kept_BhN in enumerate(kept)
        for head, place in (kept_BhN[0] & competes[layer]).nonzero().tolist()
    }
    assert found == plain_triples(scores, candidates, total)


def test_it_is_what_kvzip_does_of_itself():
    regions = torch.full((2, 12), 3)
    scores = [Scores(random_scores(seed, 2, 2, 12), torch.zeros(2, 12, dtype=torch.bool)) for seed in range(3)]
    candidates = Candidates([regions] * 3, [regions > 0] * 3, torch.full((3, 2), 4))
    heads_alone = build_eviction("pooled(kvzip)", pool="head")
    for ours, own in zip(heads_alone.keep(scores, candidates), KVzip().keep(scores, candidates), strict=True):
        assert torch.equal(ours, own)
