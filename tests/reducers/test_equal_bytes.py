"""Equal bytes to the entry: every reducer of the registry and its solved anchor, at every length."""

from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
import torch

from subtoken_train.engine.compressed_backbone import images_of_samples
from subtoken_train.ledger.kv_budget import KVBudget, KVShape
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.reducers import REDUCERS, build_reducer
from subtoken_train.reducers.base import TowerReducer, matched_reducer
from subtoken_train.types import VisualStates
from tests.support.helpers import unread
from tests.support.sampling import sampled

LENGTHS = range(1, 401)
DEPTH = 32
GROUPS = [KVBudget(1.0, 16, 4), KVBudget(1.0, 16, 15), KVBudget(1.0, 8, 7), KVBudget(1.0, 12, 5)]
RATIOS = (0.25, 0.125, 0.07, 0.9)
STAGED = (0.5, 0.6, 0.9)
"""Averages over layers that all three reducers with several cuts reach."""
OWN = {"fastv": ({}, {"stage": "decoder"}), "quest": ({}, {"page_size": 7, "window": 5})}
CASES = [(name, own) for name in REDUCERS if name != "none" for own in OWN.get(name, ({},))]
LEVEL = [(name, own) for name, own in CASES if not REDUCERS.find(name).staged]
"""Those that keep as many tokens in every layer from their cut on."""


def check_apart(name, own, groups, ratio, lengths):
    """In whole tokens of all layers, of which the layers below a cut hold every one in both arms."""
    routed, each = build_reducer(name, ratio, **own), groups.exact_total
    anchor, cut = matched_reducer(routed, groups, DEPTH, 100), routed.cut_layer(DEPTH)
    for tokens in lengths:
        ours, its = (reducer.layer_tokens(tokens, DEPTH) for reducer in (routed, anchor))
        assert ours[:cut] == its[:cut] == [tokens] * cut
        assert all(0 < low <= high <= tokens for counts in (ours, its) for high, low in pairwise(counts))
        apart = (sum(its[cut:]) - each * sum(ours[cut:])) / Fraction(DEPTH)
        assert 0 <= apart < 1, (ratio, tokens, ours, its)


@sampled(("name", "own"), CASES, every=3)
def test_an_anchor_has_its_arms_bytes_and_less_than_a_token_more(name, own):
    staged = REDUCERS.find(name).staged
    for groups, ratio in zip(GROUPS, STAGED if staged else RATIOS, strict=False):
        check_apart(name, own, groups, ratio, LENGTHS[::23] if staged else LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "own"), CASES)
@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: f"S{groups.num_groups}K{groups.kept_groups}")
def test_it_does_at_every_length_and_ratio(name, own, groups):
    for ratio in STAGED if REDUCERS.find(name).staged else RATIOS:
        check_apart(name, own, groups, ratio, LENGTHS)


@pytest.mark.parametrize(("name", "own"), LEVEL)
def test_a_routed_arm_keeps_what_it_promises_rounded_down(name, own):
    for per_mille in (1, 125, 250, 333, 999):
        reducer = build_reducer(name, per_mille / 1000, **own)
        assert [reducer.kept_tokens(n) for n in LENGTHS] == [max(1, n * per_mille // 1000) for n in LENGTHS]


@pytest.mark.parametrize("name", [name for name in REDUCERS if issubclass(REDUCERS.find(name), TowerReducer)])
@pytest.mark.parametrize("per_mille", [1, 70, 250, 900])
def test_a_samples_images_share_its_budget_to_the_token(name, per_mille):
    """32 frames of 7 tokens at 25 % are 56 tokens; each rounded for itself, they would be 32."""
    sizes, samples, generator = [*[7] * 32, 9, 1, 4, 25], [32, 3, 0, 1], torch.Generator().manual_seed(0)
    tokens = [torch.randn(size, 5, generator=generator) for size in sizes]
    received, keys = [part[:, 0].sigmoid() for part in tokens], [part[:, 1:] for part in tokens]
    states = VisualStates(tokens, [part[0] for part in tokens], received, keys, images_per_sample=samples)
    merged = build_reducer(name, per_mille / 1000).merge(states, unread(states))
    counts = [len(part) for part in merged.tokens]
    assert counts == [int(slots_T.sum()) for slots_T in merged.slots]
    assert all(kept <= size for kept, size in zip(counts, sizes, strict=True))
    for first, end in pairwise(accumulate(samples, initial=0)):
        total = sum(sizes[first:end])
        assert sum(counts[first:end]) == (max(1, total * per_mille // 1000) if total else 0)
        assert first == end or counts[end - 1] > 0  # whose last row a token may be read from


def test_images_are_told_apart_by_their_samples_tokens():
    assert images_of_samples([0, 21, 9, 0, 5], [7, 7, 7, 9, 5]) == [0, 3, 1, 0, 1]


SHAPE = KVShape(16, 4, 64)


@pytest.mark.parametrize(("name", "settings"), [("fastv", {}), ("fastv", {"stage": "decoder"})])
@pytest.mark.parametrize("tokens", [64, 576])
def test_what_is_stored_once_per_sample_is_paid_for(name, settings, tokens):
    routed, budget = build_reducer(name, 0.25, **settings), KVBudget(1.0, 64, 12, fill="mean")
    anchor = matched_reducer(routed, budget, SHAPE.num_layers, tokens)
    cut = routed.cut_layer(SHAPE.num_layers)
    ours = nominal_ledger(SHAPE, {"visual": tokens}, budget, cut, routed.layer_tokens(tokens, 16)).bytes_of(None, False)
    its = nominal_ledger(SHAPE, {"visual": tokens}, KVBudget(), cut, anchor.layer_tokens(tokens, 16)).bytes_of()
    assert 0 <= its - ours < (SHAPE.num_layers - cut) * 2 * SHAPE.side_bytes
    assert tokens != 64 or anchor.kept_tokens(tokens) == 10 or cut


def test_cut_keys_are_cut_in_both():
    thin = KVBudget(1.0, 16, 4, key_channels=0.5)
    assert matched_reducer(build_reducer("fastv", 0.25), thin, 8, 576).keep_ratio == pytest.approx(0.25 * 0.75 / 1.5)


@pytest.mark.parametrize(
    ("reducer", "match"),
    [
        (build_reducer("none"), "no token reducer"),
        (build_reducer("prumerge", 0.25, adaptive=True), "another number of tokens"),
    ],
)
def test_where_there_is_none_it_says_why(reducer, match):
    with pytest.raises(ValueError, match=match):
        matched_reducer(reducer, KVBudget(1.0, 16, 1), 3, 576)
