"""ChunkKV: chunks stay whole, the budget is met exactly, and one set serves all heads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.basic import KNorm
from subtoken_train.evictions.wrappers import ChunkKV, chunk_ranks
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from tests.support.prompt_views import PROMPTS, candidates_of, layer_views


def plain_order(scores, competes, protected, length):
    """Competing places of one sample, best chunk first, in it the best entry; scores are sums over heads."""
    able = [place for place, able in enumerate(competes) if able]
    chunks = [able[start : start + length] for start in range(0, len(able), length)]

    def worth(chunk):
        free = [scores[place] for place in chunk if not protected[place]]
        return sum(free) / len(free) if free else -float("inf")

    ranked = sorted(chunks, key=lambda chunk: -worth(chunk))
    return [place for chunk in ranked for place in sorted(chunk, key=lambda place: -scores[place])]


@st.composite
def choices(draw):
    batch, heads, length = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 11))
    count = batch * heads * length
    score = st.sampled_from([-8.0, -1.5, -0.0, 0.0, 0.5, 2.0, 64.0])
    scores = torch.tensor(draw(st.lists(score, min_size=count, max_size=count))).view(batch, heads, length)
    marks = st.lists(st.booleans(), min_size=batch * length, max_size=batch * length)
    competes, protected = (torch.tensor(draw(marks)).view(batch, length) for _ in range(2))
    return scores, competes, protected, draw(st.integers(1, 12))


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(choices())
def test_the_order_is_the_plain_one(choice):
    scores, competes, protected, length = choice
    ranks = chunk_ranks(*choice)
    assert ranks.sort(-1).values.tolist() == [list(range(scores.shape[-1]))] * len(scores)
    for sample, of_heads in enumerate(scores):
        expected = plain_order(of_heads.sum(0).tolist(), competes[sample], protected[sample], length)
        assert ranks[sample].argsort()[: len(expected)].tolist() == expected


@pytest.mark.parametrize("count", [8, 9, 11])
def test_chunks_stay_whole_but_the_last(count):
    method = ChunkKV(KNorm(), length=4)
    views = layer_views([PROMPTS["context"], PROMPTS["context"]], method.needs, "left")
    competes = [view.regions_BN == Region.CONTEXT for view in views]
    budget = torch.full((len(views), 2), count)
    scores = [method.score(view) for view in views]
    kept = method.keep(scores, Candidates([view.regions_BN for view in views], competes, budget))
    for layer, view in enumerate(views):
        assert kept[layer].shape[1] == 1
        for sample in range(2):
            places = competes[layer][sample].nonzero()[:, 0]
            stays = kept[layer][sample, 0, places].tolist()
            chunks = [stays[start : start + 4] for start in range(0, len(stays), 4)]
            broken = [chunk for chunk in chunks if any(chunk) and not all(chunk)]
            assert sum(stays) == count
            assert len(broken) <= 1
            assert kept[layer][sample, 0, view.regions_BN[sample] == Region.QUERY].all()


def test_protected_entries_stay_beside_the_chunks():
    """Sinks and a window inside the budget: what they leave goes to the best chunks."""
    method = build_eviction("chunk(snapkv)", window=3, length=3)
    views = layer_views([[int(Region.CONTEXT)] * 14], method.needs)
    kept = method.keep([method.score(view) for view in views], candidates_of(method, views, 0.5))
    for each in kept:
        assert each[0, 0, -3:].all()
        assert int(each.sum()) == 7


def test_a_chunk_longer_than_the_budget_is_cut():
    """The best entries of the best chunk stay: as many as the budget has, of a prompt of any length."""
    method = ChunkKV(KNorm(), length=20)
    for prompt, keep in ((PROMPTS["context"], 0.5), (PROMPTS["no image"], 1.0), (PROMPTS["context"][:1], 0.1)):
        views = layer_views([prompt], method.needs)
        scores, candidates = [method.score(view) for view in views], candidates_of(method, views, keep)
        assert method.counts(scores, candidates).tolist() == candidates.budget_LB.tolist()
        for its, found, kept in zip(views, scores, method.keep(scores, candidates), strict=True):
            count = int(kept.sum())
            assert count == max(1, int(len(prompt) * keep))
            summed = found.scores_BhN[0].sum(0)
            chunks = [range(start, min(start + 20, len(prompt))) for start in range(0, len(prompt), 20)]
            best = max(chunks, key=lambda places: float(summed[list(places)].mean()))
            if count <= len(best):
                expected = sorted(best, key=lambda place: -float(summed[place]))[:count]
                assert kept[0, 0].nonzero()[:, 0].tolist() == sorted(expected)
            assert its.entries_BN.all()


def test_heads_that_differ_are_refused():
    with pytest.raises(
        ValueError, match=r"chunk keeps one set for all heads, and heads of ada\(knorm\) keep different"
    ):
        build_eviction("chunk(ada(knorm))")
    with pytest.raises(ValueError, match=r"heads of per_layer\(ada\(knorm\)\) keep different numbers"):
        build_eviction("chunk(per_layer(ada(knorm)))", shares=[1])
    method = build_eviction("chunk(kvcompose)", structured=False, task="causal", length=2)
    views = layer_views([PROMPTS["context"]], method.needs)
    with pytest.raises(ValueError, match="heads of kvcompose keep different numbers"):
        method.counts([method.score(view) for view in views], candidates_of(method, views, 0.5))
