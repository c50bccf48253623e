"""The token reducer of a matched token-only anchor: whole values of fewer tokens, in the bytes of a routed arm."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from subtoken_train.ledger.kv_budget import KVBudget
from subtoken_train.reducers.base import Reducer


def matched_reducer(reducer: Reducer, routed: KVBudget, num_layers: int, tokens: int) -> Reducer:
    """Return the same reducer at the keep ratio that the ledger solves for, its counts rounded up from the arm's.

    It holds the arm's bytes and less than a token more, at every length; what an arm stores once per sample is paid for
    at ``tokens``. Layers below its first cut hold every token with every group, in both arms.

    Args:
        reducer: of the routed arm.
        routed: what that arm stores of a token that its reducer keeps; its keep ratio is not read.
        num_layers: of the model.
        tokens: of a sample before the reducer; read where the arm stores something once per sample.

    Raises:
        ValueError: there is none: no token reducer, or one whose count is not fixed.
    """
    if reducer.name == "none":
        raise ValueError("it has no token reducer, so there is nothing that could keep fewer tokens instead")
    reducer.check_anchor()
    whole = KVBudget(key_channels=routed.key_channels)
    routed = replace(routed, keep_ratio=1.0)
    per_token = routed.exact_total / whole.exact_total
    beside = (routed.total_of(tokens) - routed.exact_total) / whole.exact_total
    below = Fraction(reducer.cut_layer(num_layers), num_layers)
    share = below + (reducer.mean_share(num_layers) - below) * per_token + (1 - below) * beside
    return reducer.at_share(share, num_layers)
