"""Views by their old names, what a place lacks, and scores while decoding against a simulation token by token."""

import sys

import pytest
import torch

from subtoken_train.errors import SubTokenWarning
from subtoken_train.evictions import EVICTIONS, base, build_eviction
from subtoken_train.reducers.base import ReducerView
from subtoken_train.routing import SelectorInput
from subtoken_train.types import Region
from subtoken_train.view import view
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import View
from tests.support.golden_cases import close, load

HEADS, GROUP, WIDTH, PROMPT = 2, 2, 8, 12


def view_of(method, queries, keys, alive, rows, carried=None):
    """Make a view: heads hold ``alive`` [h][n] of P places, queries [h * G, P, d], keys [h, P, d]; the last ask."""
    heads, seen = len(alive), keys.shape[1]
    place = torch.tensor(alive)
    own = torch.stack([keys[head, place[head]] for head in range(heads)])[:, None]
    asked = queries[:, seen - rows :].reshape(heads, -1, rows, queries.shape[-1])
    regions = torch.full(place.shape, int(Region.GENERATED))
    return View(
        0, asked, own, own, regions, queries.shape[-1] ** -0.5, method.needs, carried=carried, place_BN=place,
        seen_B=torch.full((heads,), seen), heads=heads,
    )  # fmt: skip


def attention(queries, keys, head, row, alive):
    """Attention of one row of each query head of a head over its living places up to the row, {place: [G]}."""
    places = [place for place in alive if place <= row]
    group = len(queries) // len(keys)
    logits = torch.stack(
        [queries[head * group : (head + 1) * group, row] @ keys[head, place] for place in places], -1
    ) * (queries.shape[-1] ** -0.5)
    return dict(zip(places, logits.softmax(-1).T, strict=True))


def drawn(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(HEADS * GROUP, length, WIDTH, generator=generator)
    return queries, torch.randn(HEADS, length, WIDTH, generator=generator)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("group", ["mean", "max"])
def test_h2o_goes_on_adding(group, normalise):
    """Three evictions of two tokens each: sums are those of all rows since the prompt over what was there."""
    method = build_eviction("h2o", group=group, normalise=normalise, recent_share=0.25)
    queries, keys = drawn(PROMPT + 6)
    alive = [list(range(PROMPT)) for _ in range(HEADS)]
    sums = [{place: torch.zeros(GROUP) for place in range(PROMPT + 6)} for _ in range(HEADS)]
    carried = torch.zeros(HEADS, GROUP if group == "max" else 1, PROMPT)
    for stop in (PROMPT + 2, PROMPT + 4, PROMPT + 6):
        for head in range(HEADS):
            alive[head] += [stop - 2, stop - 1]
            for row in (stop - 2, stop - 1):
                for place, paid in attention(queries, keys, head, row, alive[head]).items():
                    sums[head][place] += paid
        view = view_of(method, queries[:, :stop], keys[:, :stop], alive, 2, torch.nn.functional.pad(carried, (0, 2)))
        scores = method.score(view)
        for head in range(HEADS):
            for i, place in enumerate(alive[head]):
                paid = sums[head][place] / (stop - place if normalise else 1)
                expected = paid.mean() if group == "mean" else paid.amax()
                assert torch.isclose(scores.scores_BhN[head, 0, i], expected, atol=1e-5)
        everyone = torch.ones(HEADS, len(alive[0]), dtype=torch.bool)
        budget = torch.full((1, HEADS), 10)
        kept = method.keep([scores], Candidates([view.regions_BN], [everyone], budget, heads=HEADS))[0][:, 0]
        assert kept[:, -2:].all()  # a quarter of 10 is recent
        carried = torch.stack([scores.carried[head][:, kept[head]] for head in range(HEADS)])
        alive = [[p for p, stays in zip(alive[h], kept[h], strict=True) if stays] for h in range(HEADS)]
        assert [len(each) for each in alive] == [10, 10]


def test_kvcompose_means_are_of_the_same_token():
    """A head that let a token go counts 0 for it."""
    method = build_eviction("kvcompose")
    queries, keys = drawn(PROMPT)
    alive = [[0, 1, 4, 7, 9, 10, 11], [0, 2, 4, 5, 9, 10, 11]]
    scores = method.score(view_of(method, queries, keys, alive, 3)).scores_BhN[:, 0]
    own = []
    for head in range(HEADS):
        rows = [attention(queries, keys, head, row, alive[head]) for row in (9, 10, 11)]
        own.append({p: torch.stack([row[p] for row in rows if p in row]).amax(0).mean() for p in alive[head]})
    for head in range(HEADS):
        for i, place in enumerate(alive[head]):
            mean = sum(each.get(place, torch.tensor(0.0)) for each in own) / HEADS
            assert torch.isclose(scores[head, i], own[head][place] + mean, atol=1e-6)


def test_snapkv_pools_over_what_is_left():
    """The window's rows that were decoded since the last eviction observe; pooling is over neighbours in the cache."""
    method = build_eviction("snapkv", window=4, kernel=3)
    queries, keys = drawn(PROMPT)
    alive = [[0, 1, 4, 7, 9, 10, 11], [0, 2, 4, 5, 9, 10, 11]]
    scores = method.score(view_of(method, queries, keys, alive, 2))
    assert scores.protected_BN.tolist() == [[False] * 3 + [True] * 4] * 2
    for head in range(HEADS):
        rows = [attention(queries, keys, head, row, alive[head]) for row in (10, 11)]
        before = torch.stack([sum(row[p] for row in rows) for p in alive[head][:3]], -1)
        padded = torch.nn.functional.pad(before, (1, 1))
        pooled = (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3
        assert torch.allclose(scores.scores_BhN[head, 0, :3], pooled.mean(0), atol=1e-6)


def test_golden_h2o_decode_steps(shared):
    """The original's accumulated scores and masks at every decoding step; its recent ones count the slot to come."""
    params, tensors = load(shared, "h2o_official_decode")
    heavy, recent, length = params["heavy_budget"], params["recent_budget"], params["prompt_len"]
    method = build_eviction("h2o", window=recent - 1)
    queries, keys = tensors["queries"][0], tensors["keys"][0]
    heads = len(keys)
    kept = tensors["next_mask_step0"][:, :length] > 0
    carried = tensors["acc_scores_step0"]
    alive = [kept[head].nonzero()[:, 0].tolist() for head in range(heads)]
    carried = torch.stack([carried[head, alive[head]] for head in range(heads)])[:, None]
    for step in range(1, params["decode_steps"] + 1):
        stop = length + step
        alive = [[*places, stop - 1] for places in alive]
        view = view_of(method, queries[:, :stop], keys[:, :stop], alive, 1, torch.nn.functional.pad(carried, (0, 1)))
        scores = method.score(view)
        everyone = torch.ones(heads, len(alive[0]), dtype=torch.bool)
        budget = torch.full((1, heads), heavy + recent - 1)
        chosen = method.keep([scores], Candidates([view.regions_BN], [everyone], budget, heads=heads))[0][:, 0]
        carried = torch.stack([scores.carried[head][:, chosen[head]] for head in range(heads)])
        alive = [[p for p, stays in zip(alive[h], chosen[h], strict=True) if stays] for h in range(heads)]
        expected = tensors[f"next_mask_step{step}"][:, :stop] > 0
        assert alive == [expected[head].nonzero()[:, 0].tolist() for head in range(heads)]
        golden = tensors[f"acc_scores_step{step}"]
        golden = torch.stack([golden[head, alive[head]] for head in range(heads)])
        close(method, f"h2o_official_decode step {step}: scores", carried[:, 0], golden)


def test_what_is_declared():
    """Rows that a method reads; whoever inherits from one that can says for itself that it cannot."""
    found = {name: EVICTIONS.find(name)().online for name in EVICTIONS}
    rows = {name: online.rows for name, online in found.items() if online is not None}
    of_last = {"streaming_llm": 0, "tova": 1, "snapkv": 64, "kvzap": 0, "triattention": 0, "rkv": 8}
    of_last |= dict.fromkeys(("cake", "headkv", "sparsemm"), 32)
    assert rows == dict.fromkeys(("h2o", "look_m", "kvcompose")) | of_last


def test_they_are_the_same_classes(monkeypatch):
    monkeypatch.delitem(sys.modules, "subtoken_train.evictions.layer_views", raising=False)
    with pytest.warns(SubTokenWarning, match=r"evictions\.layer_views is now subtoken_train\.view\.view"):
        from subtoken_train.evictions.layer_views import LayerView, Need, Scope, TaskView
    assert {LayerView, TaskView, ReducerView, SelectorInput} == {view.View}
    assert (Need, Scope) == (view.Need, view.Scope)
    assert base.LayerScores is Scores
    assert base.Candidates is Candidates


def test_what_a_place_lacks_or_is_called_otherwise_now_is_said():
    given = view.View(layer=3, hidden_BND=torch.zeros(1, 2, 4))
    for name, error, words in (
        ("embeds_BND", AttributeError, "unknown field of a view 'embeds_BND'. Did you mean"),
        ("asks_BN", ValueError, "did not ask for it: add 'asks'"),
        ("query_summary_BD", ValueError, "there is none: set query_conditioned = True"),
        ("scout", ValueError, "there is none: this place of the pass has layer, .*hidden_BND"),
    ):
        with pytest.raises(error, match=words):
            getattr(given, name)
    assert given.replaced(layer=1).layer == 1
