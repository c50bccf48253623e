"""FastV (Chen et al., 2024): rank visual tokens by the attention they get from the last prompt token at L_f - 1.

Layers 0 .. L_f-1 see every token; the ranking is the head-mean attention row of the last prompt token in layer L_f-1;
kept rows stay in order at their original positions. The official code ranks batch element 0 for the whole batch; here
every sample ranks its own. L_f = 0, the official random branch, is the ``random`` reducer here.

Two stages. ``embeds``: a scout runs the first layers on the full prompt, then the shortened input starts again at layer
0; every layer's cache is short, and the scout's time counts as prefill. ``decoder``: the published method, layers below
L_f keep every token.
"""

from __future__ import annotations

from torch import Tensor

from subtoken_train.errors import unknown_name
from subtoken_train.reducers.base import RankingReducer, ReducerConfig, ReducerView

_STAGES = ("embeds", "decoder")


class FastV(RankingReducer):
    """FastV with ``layer`` = L_f >= 1; see the module's text for the two stages."""

    ranks = True

    def __init__(self, config: ReducerConfig) -> None:
        super().__init__(config)
        if config.stage not in _STAGES:
            raise unknown_name("FastV stage", config.stage, _STAGES)
        self.stage = config.stage
        self.scout_layers = config.layer
        self.cut_layer = config.layer if config.stage == "decoder" else 0

    def scores(self, view: ReducerView) -> Tensor:
        """The attention row of layer L_f - 1, [B, N]."""
        return view.attention_row(self.config.layer - 1)
