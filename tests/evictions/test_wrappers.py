"""Wrappers: what all take from their base, shares of layers, one pool, and chunks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.evictions import WRAPPERS, build_eviction
from subtoken_train.evictions.base import Eviction, Wrapper
from subtoken_train.evictions.keys import KNorm
from subtoken_train.evictions.kvcompose import KVCompose
from subtoken_train.evictions.wrappers import PerLayer, chunk_ranks
from tests.support.prompt_views import LAYERS, PROMPTS, candidates_of, layer_views
from tests.support.truth_models import OwnSets

SHARES = {"per_layer": {"shares": [1] * LAYERS}}


def around(name, base):
    return WRAPPERS[name](base, **SHARES.get(name, {}))


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_a_method_says_of_itself_is_passed_on(name):
    for task in ("aware", "agnostic"):
        base = KVCompose(task=task)
        wrapper = around(name, base)
        assert wrapper.name == f"{name}(kvcompose)"
        assert type(wrapper).name == name
        assert wrapper.needs >= base.needs
        assert wrapper.reads_question == base.reads_question
        regions = torch.tensor([PROMPTS["image last"]])
        assert torch.equal(wrapper.second_pass(regions), base.second_pass(regions))
        assert wrapper.inside == (base,)
    assert not around(name, build_eviction("knorm")).needs_image
    assert around("per_layer", build_eviction("aircache")).needs_image
    assert around("per_layer", build_eviction("aircache")).reads_question
    assert around("per_layer", build_eviction("aircache")).heads_share


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_method_that_says_itself_what_stays_is_refused(name):
    with pytest.raises(ValueError, match=f"own_sets says itself what stays, so {name} cannot be put around it"):
        around(name, OwnSets())
    with pytest.raises(ValueError, match=f"quest_steps keeps every entry and reads some, so {name} has nothing"):
        around(name, build_eviction("quest_steps"))


def test_nothing_of_a_base_is_forgotten():
    """Whatever a method says of itself is passed on or said anew, but for what is refused.

    That is: own ways to keep or read, and a wrapper as a context reducer, whose settings ``evenly`` says.
    """
    public = {key for key in vars(Eviction) if not key.startswith("_")} - {"keep", "reads", "pages", "evenly"}
    assert public <= {*vars(Wrapper), *vars(around("ada", build_eviction("knorm")))}


def counts_of(method, keep, prompts=("context",)):
    views = layer_views([PROMPTS[name] for name in prompts], method.needs)
    candidates = candidates_of(method, views, keep)
    return method.counts([method.score(view) for view in views], candidates), candidates


def test_layers_keep_what_they_are_told():
    counts, candidates = counts_of(PerLayer(KNorm(), (3, 2, 1)), 0.4)
    assert candidates.budget_LB[:, 0].tolist() == [10, 10, 10]
    assert counts[:, 0].tolist() == [15, 10, 5]
    assert counts_of(PerLayer(KNorm(), (0.3, 0.2, 0.1)), 0.4)[0][:, 0].tolist() == [15, 10, 5]


def test_what_a_layer_cannot_take_goes_to_the_others_and_none_is_empty():
    counts, candidates = counts_of(PerLayer(KNorm(), (100, 0, 1)), 0.6)
    assert counts[:, 0].tolist() == [25, 1, 19]
    assert int(counts.sum()) == int(candidates.budget_LB.sum())


def test_as_many_shares_as_layers():
    for chain in ("per_layer(knorm)", "ada(per_layer(knorm))"):
        with pytest.raises(ValueError, match="per_layer has 2 shares and the backbone 3 layers; give one each"):
            build_eviction(chain, shares=[1, 2]).check_shape(3, 2, 8)
        build_eviction(chain, shares=[1, 2]).check_shape(2, 2, 8)


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


@settings(deadline=None, max_examples=60)
@given(choices())
def test_the_order_is_the_plain_one(choice):
    scores, competes, protected, length = choice
    ranks = chunk_ranks(*choice)
    assert ranks.sort(-1).values.tolist() == [list(range(scores.shape[-1]))] * len(scores)
    for sample, of_heads in enumerate(scores):
        expected = plain_order(of_heads.sum(0).tolist(), competes[sample], protected[sample], length)
        assert ranks[sample].argsort()[: len(expected)].tolist() == expected


def test_heads_that_differ_are_refused():
    with pytest.raises(
        ValueError, match=r"chunk keeps one set for all heads, and heads of ada\(knorm\) keep different"
    ):
        build_eviction("chunk(ada(knorm))")
    with pytest.raises(ValueError, match=r"heads of per_layer\(ada\(knorm\)\) keep different numbers"):
        build_eviction("chunk(per_layer(ada(knorm)))", shares=[1])
    with pytest.raises(ValueError, match="heads of kvcompose keep different numbers"):
        build_eviction("chunk(kvcompose)", structured=False)
