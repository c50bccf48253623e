"""The matched anchor's reducer: the ledger's fraction, whatever the cut, and where there is none."""

from __future__ import annotations

import pytest

from subtoken_train.ledger.kv_budget import KVBudget, KVShape
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import matched_reducer

S16K4 = KVBudget(1.0, 16, 4)
SHAPE = KVShape(16, 4, 64)


@pytest.mark.parametrize(("name", "settings"), [("fastv", {}), ("visionzip", {}), ("fastv", {"stage": "decoder"})])
@pytest.mark.parametrize("ratio", [0.25, 0.5])
@pytest.mark.parametrize("tokens", [576, 577])
def test_it_has_the_routed_arms_bytes_and_a_token_more_at_most(name, settings, ratio, tokens):
    routed = build_reducer(name, ratio, **settings)
    anchor = matched_reducer(routed, S16K4, SHAPE.num_layers, tokens)
    assert anchor.round_up
    cut = routed.cut_layer(SHAPE.num_layers)
    budget = KVBudget(ratio, 16, 4)
    ours = nominal_ledger(SHAPE, {"visual": tokens}, budget, cut, routed.layer_tokens(tokens, 16)).bytes_of(None, False)
    its = nominal_ledger(SHAPE, {"visual": tokens}, KVBudget(), cut, anchor.layer_tokens(tokens, 16)).bytes_of()
    assert 0 <= its - ours < (SHAPE.num_layers - cut) * 2 * SHAPE.side_bytes


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
