"""FasterVLM (Zhang et al., 2024, arXiv:2412.01818): keep the visual tokens that the tower's class token attends to.

Acts in the tower, per image, before the projector. Tokens are ranked by the class token's attention in the layer that
made them, the mean over heads (their sum here, the same order); the best r * T stay, in raster order. Nothing is
merged and the question is not read. A tower without a class token is refused: attention received from all patches is
not put in its place. Positions are the family's to say (LLaVA: counted anew, as released). The last token of a prompt
that ends with its image stays, inside the budget, since the next token is read from its row.

A picture in tiles is ranked as one, each patch by the attention of its own tile's class token; newlines go first.

There is no released output to compare with: tests hold it to a plain reading of the paper, section 3.3.

Legend: T tokens of one image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.functional.gather import keep_best
from subtoken_train.reducers.base import TowerChoice
from subtoken_train.types import TowerStatistics, VisualStates


@dataclass(frozen=True, kw_only=True)
class FasterVLM(TowerChoice):
    """FasterVLM with ``keep_ratio`` tokens per image; ``keep_ratio`` 1 bypasses it."""

    name: str = "fastervlm"

    statistics: ClassVar[TowerStatistics] = "class"

    def kept(self, states: VisualStates, image: int, kept: int, read_T: Tensor) -> Tensor:
        assert states.received is not None
        count = read_T.sum().clamp(min=kept)
        scores_1T = states.received[image].masked_fill(read_T, torch.inf)[None]
        return keep_best(scores_1T, torch.ones_like(read_T)[None], count[None])[0]
