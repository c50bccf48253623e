"""CriticalKV: two stages by a plain reference of the paper and the release, alone and with heads that differ."""

import math

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.basic import KNorm
from subtoken_train.evictions.snapkv import SnapKV
from subtoken_train.evictions.wrappers import NORM, CriticalKV, projected_norm, two_stages
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View
from tests.support.golden_cases import close, load, same_places
from tests.support.prompt_views import HEADS, KV_HEADS, PROMPTS, WIDTH, layer_views


def plain_norm(value, weight):
    """||W_o v||_1 of one head's value, one query head after another, [D, d] each; mean over the group."""
    return sum(sum(abs(float(row @ value)) for row in each) for each in weight) / len(weight)


def plain_critical(scores, norms, count, first_share, epsilon):
    """Algorithm 1 of the paper for one head: kept places."""
    stage_1 = sorted(range(len(scores)), key=lambda place: -scores[place])[: math.floor(count * first_share)]
    weighed = {i: (scores[i] + epsilon) * norms[i] for i in range(len(scores)) if i not in stage_1}
    return {*stage_1, *sorted(weighed, key=lambda place: -weighed[place])[: count - len(stage_1)]}


def test_norms_are_those_of_every_query_head():
    view = layer_views([PROMPTS["context"]], KNorm.needs | {"values"})[0]
    weight = view.output_weight()
    found = projected_norm(view.value_BhNd, weight)[0]
    group = HEADS // KV_HEADS
    for head in range(KV_HEADS):
        own = [weight[:, i * WIDTH : (i + 1) * WIDTH] for i in range(head * group, (head + 1) * group)]
        expected = [plain_norm(value, own) for value in view.value_BhNd[0, head]]
        assert torch.allclose(found[head], torch.tensor(expected), rtol=1e-5)


def test_norms_of_many_entries_are_those_of_a_few(monkeypatch):
    view = layer_views(list(PROMPTS.values()), KNorm.needs | {"values"})[0]
    whole = projected_norm(view.value_BhNd, view.output_weight())
    monkeypatch.setattr("subtoken_train.evictions.wrappers.ROWS", 4)
    assert torch.allclose(projected_norm(view.value_BhNd, view.output_weight()), whole)


@pytest.mark.parametrize("first_share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 5, 12])
def test_kept_sets_are_those_of_the_paper(first_share, count):
    method = CriticalKV(SnapKV(window=4), first_share=first_share, epsilon=0.01)
    codes = PROMPTS["context"]
    views = layer_views([codes, PROMPTS["no image"]], method.needs, "left")
    scores = [method.score(view) for view in views]
    competes = [view.regions_BN == Region.CONTEXT for view in views]
    budget = torch.tensor([[count, 0]] * len(views))
    kept = method.keep(scores, Candidates([view.regions_BN for view in views], competes, budget))
    for layer, view in enumerate(views):
        start = view.regions_BN.shape[1] - len(codes)
        span = slice(start, start + codes.count(int(Region.CONTEXT)))
        for head in range(KV_HEADS):
            its, norms = (
                each[0, head, span].tolist() for each in (scores[layer].scores_BhN, scores[layer].notes[NORM])
            )
            expected = plain_critical(its, norms, count, first_share, 0.01)
            assert set(kept[layer][0, head, span].nonzero()[:, 0].tolist()) == expected


def test_golden(shared):
    params, tensors = load(shared, "kvpress_criticalkv_knorm")
    key, value, weight = (tensors[name] for name in ("key", "value", "o_proj_weight"))
    method = CriticalKV(KNorm(), params["first_stage_ratio"], params["epsilon"])
    view = View(
        0, key, key, value, torch.full(key.shape[::2], int(Region.QUERY)), 1.0, method.needs,
        output_weight=lambda: weight,
    )  # fmt: skip
    scores = method.score(view)
    close(method, "kvpress_criticalkv_knorm: norms", scores.notes[NORM], tensors["projected_norm"])
    count = torch.tensor([params["n_kept"]] * params["B"])
    theirs, largest = tensors["scores"], torch.finfo(torch.float32).max
    ours = method.at_budget(scores, view.entries_BN, count).scores_BhN
    second = theirs < largest
    close(method, "kvpress_criticalkv_knorm: second stage", ours[second], theirs[second])
    assert (ours.masked_fill(second, torch.inf).amin(-1) > ours.masked_fill(~second, -torch.inf).amax(-1)).all()
    kept = method.keep([scores], Candidates([view.regions_BN], [view.entries_BN], count[None]))[0]
    same_places(method, "kvpress_criticalkv_knorm", kept, tensors["kept"])


def released_critical_ada(scores, norms, count, alpha, first_share, epsilon):
    """Kvpress's CriticalAdaKVPress for one sample of one layer, head by head: kept places."""
    heads, length = scores.shape
    first = scores.clone()
    safe = int(count * alpha)
    first.scatter_(-1, first.topk(safe, dim=-1).indices, torch.inf)
    owners = first.flatten().topk(heads * count).indices // length
    kept = []
    for head in range(heads):
        budget = int((owners == head).sum())
        its = first[head].tolist()
        kept.append(plain_critical(its, norms[head].tolist(), budget, first_share, epsilon))
        safest = sorted(range(length), key=lambda place: -its[place])[:safe]
        assert set(safest) <= kept[-1] or safe > budget * first_share
    return kept


@pytest.mark.parametrize("chain", ["ada(critical(snapkv))", "critical(ada(snapkv))"])
@pytest.mark.parametrize("count", [8, 16])
def test_critical_ada_is_the_paper_s(chain, count):
    """Heads win by the base's scores; then each head's own budget is halved. In either order of the two."""
    method = build_eviction(chain, window=2, epsilon=0.01)
    views = layer_views([PROMPTS["no image"] * 3], method.needs)
    scores = [method.score(view) for view in views]
    places = torch.arange(views[0].regions_BN.shape[1])
    for each in scores:  # as in the release, where the window has the largest score
        each.scores_BhN = each.scores_BhN.masked_fill(each.protected_BN[:, None], 10.0)
        each.protected_BN = torch.zeros_like(each.protected_BN)
    entries = [view.entries_BN for view in views]
    budget = torch.full((len(views), 1), count)
    kept = method.keep(scores, Candidates([view.regions_BN for view in views], entries, budget))
    for layer, its in enumerate(scores):
        expected = released_critical_ada(its.scores_BhN[0], its.notes[NORM][0], count, 0.2, 0.5, 0.01)
        assert [set(places[row].tolist()) for row in kept[layer][0]] == expected
        assert sum(map(len, expected)) == KV_HEADS * count


def test_heads_that_share_a_set_share_the_norm():
    method = CriticalKV(build_eviction("streaming_llm"))
    view = layer_views([PROMPTS["context"]], method.needs)[0]
    norm = method.score(view).notes[NORM]
    every = projected_norm(view.value_BhNd, view.output_weight())
    assert torch.equal(norm, every.mean(1, keepdim=True))


def test_scores_of_any_size_stay_numbers_in_their_order():
    scores = torch.tensor([[[-torch.inf, -3e38, 0.0, 1.0, 3e38, torch.inf]]])
    norm = torch.tensor([[[0.0, 5.0, 0.0, 2.0, 1e30, 1e30]]])
    first = torch.tensor([[[True, False, False, False, False, False]]])
    found = two_stages(scores, first, norm, 0.0)
    assert found.isfinite().all()
    assert found[0, 0, 0] > found[0, 0, 1:].max()
    second = found[0, 0, 1:].tolist()
    assert second == sorted(second)


def test_chunks_inside_are_refused():
    for chain in ("critical(chunk(knorm))", "critical(per_layer(chunk(knorm)))"):
        with pytest.raises(ValueError, match=r"chunk ranks chunks of them; write chunk\(critical\(knorm\)\)"):
            build_eviction(chain, **({"shares": [1]} if "per" in chain else {}))
