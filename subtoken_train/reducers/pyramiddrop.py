"""PyramidDrop (Xing et al., 2024): the language model in stages, and at each stage's end a share of the image leaves.

Source: "PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual Redundancy Reduction"
(2410.17247), section 3. A reconstruction from the paper: stages of equal depth (layers 8, 16 and 24 of 32 are the first
of a stage); the last layer of a stage ranks the visual tokens by the attention of the last instruction token (its query
against their keys, mean over heads), and the best share of them goes on, at its own positions. Every layer's cache
holds what that layer saw. Training uses it too.

Here ``keep_ratio`` is the average share of the visual tokens that all layers hold, and the stages' common share is
solved from it: the paper's half is 0.46875 in four stages (15/32). The first stage holds every token with every group,
so an average of a quarter or less is out of reach. All images of a sample are ranked together.

What it does not do: the paper's share per stage of its own (ablations alone), and its choice of the ranking layer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

from torch import Tensor

from subtoken_train.reducers.staged import StagedReducer
from subtoken_train.view.method import setting
from subtoken_train.view.view import View

STEPS = 2**30
"""In which a stage's share is solved; a half is exact."""


@dataclass(frozen=True, kw_only=True)
class PyramidDrop(StagedReducer):
    """PyramidDrop.

    Attributes:
        stages: into which the decoder layers are divided; tokens leave between them.
    """

    name: str = "pyramiddrop"
    stages: int = setting(4, 2, 10_000)

    ranks: ClassVar[bool] = True

    def cuts(self, num_layers: int) -> tuple[int, ...]:
        if num_layers < self.stages:
            raise ValueError(f"pyramiddrop: stages={self.stages}, but the model has {num_layers} layers")
        return tuple(num_layers * stage // self.stages for stage in range(1, self.stages))

    def layer_shares(self, num_layers: int) -> list[Fraction]:
        cuts, average = self.cuts(num_layers), self.mean_share(num_layers)
        if average * num_layers <= cuts[0]:
            raise ValueError(
                f"pyramiddrop: keep_ratio={self.keep_ratio:g} is the average over layers, and the first {cuts[0]} of "
                f"{num_layers} layers hold every token and make {cuts[0] / num_layers:.2%} alone; raise it, or stages"
            )
        stage_L = [sum(cut <= layer for cut in cuts) for layer in range(num_layers)]
        share = stage_share(tuple(Counter(stage_L).values()), average, self.round_up)
        return [share**stage for stage in stage_L]

    def scores(self, view: View) -> Tensor:
        """The attention row of the last prompt token in the stage's last layer, [B, M]."""
        return view.attention_row(view.layer - 1)


@lru_cache
def stage_share(depths: tuple[int, ...], average: Fraction, round_up: bool) -> Fraction:
    """Return the share that each stage keeps of the one before, so that all layers hold ``average``; in steps of 2^-30.

    Args:
        average: above what the first stage alone holds, up to 1.
        round_up: to the next step that is enough, instead of down.
    """

    def held(step: int) -> Fraction:
        return sum((depth * Fraction(step, STEPS) ** i for i, depth in enumerate(depths)), Fraction()) / sum(depths)

    low, high = 0, STEPS  # ``low`` is too little, ``high`` is enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if held(middle) >= average else (middle, high)
    return Fraction(high if round_up or held(high) == average else max(1, low), STEPS)
