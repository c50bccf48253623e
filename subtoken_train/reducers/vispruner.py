"""Reducers that keep an image's own tokens by a tower's attention: FasterVLM and VisPruner.

Legend: T tokens of one image, C tower width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.functional.diversity import unit_rows, without_doubles
from subtoken_train.functional.gather import keep_best
from subtoken_train.functional.masks import top_indices
from subtoken_train.reducers.base import TowerChoice
from subtoken_train.types import TowerStatistics, VisualStates
from subtoken_train.view.method import setting


@dataclass(frozen=True, kw_only=True)
class FasterVLM(TowerChoice):
    """FasterVLM (Zhang et al., 2024, arXiv:2412.01818): keep the visual tokens that the tower's class token attends to.

    In the tower, per image, before the projector: tokens are ranked by the class token's attention in the layer that
    made them, the mean over heads; the best r * T stay, in raster order. Nothing is merged and the question is not
    read. A tower without a class token is refused. Positions are the family's to say (LLaVA: counted anew, as
    released). The last token of a prompt that ends with its image stays, inside the budget. A picture in tiles is
    ranked as one, each patch by the attention of its own tile's class token; newlines go first. There is no released
    output to compare with: tests hold it to a plain reading of the paper, section 3.3.
    """

    name: str = "fastervlm"

    statistics: ClassVar[TowerStatistics] = "class"

    def kept(self, states: VisualStates, image: int, kept: int, read_T: Tensor) -> Tensor:
        assert states.received is not None
        count = read_T.sum().clamp(min=kept)
        scores_1T = states.received[image].masked_fill(read_T, torch.inf)[None]
        return keep_best(scores_1T, torch.ones_like(read_T)[None], count[None])[0]


def important_and_distinct(tokens_TC: Tensor, received_T: Tensor, important: int, count: int) -> Tensor:
    """Indices of ``count`` tokens of an image: so many by attention, the rest unlike each other."""
    order_T = top_indices(received_T, len(received_T))
    best, others = order_T[:important], order_T[important:]
    if count == important:
        return best
    return torch.cat([best, others[without_doubles(unit_rows(tokens_TC[others]), count - important)]])


@dataclass(frozen=True, kw_only=True)
class VisPruner(TowerChoice):
    """VisPruner (Zhang et al., 2025, arXiv:2412.01818v2): half by the tower's attention, half by removing doubles.

    As released (Theia-4869/VisPruner @aefa01a), in the tower, per image, before the projector. The tokens that receive
    the most attention stay, from the class token where there is one, else from all patches (mean over heads); of the
    others, in the order of their attention, every second is matched with the most similar of those between by cosine,
    the 8 most similar ones go, and so on until the count is met. Nothing is merged; what stays is in raster order;
    positions are the family's to say. The last token of a prompt that ends with its image counts among the first half.
    An odd number of others is served; a picture in tiles is pruned as one, each patch by its own tile's attention;
    newlines go first. Where a tower's tokens leave it merged or projected (InternVL, Qwen, OneVision), likeness is that
    of these.

    Attributes:
        important: share of them that attention chooses, rounded down; 1 is FasterVLM, 0 reads attention for the order
            alone.
    """

    name: str = "vispruner"
    important: float = setting(0.5, 0, 1)

    def kept(self, states: VisualStates, image: int, kept: int, read_T: Tensor) -> Tensor:
        assert states.received is not None
        reads = int(read_T.sum())
        kept = max(kept, reads)
        newline_T = torch.zeros_like(read_T) if states.tiles is None else (states.tiles[image] < 0) & ~read_T
        own, newlines = (~newline_T).nonzero()[:, 0], newline_T.nonzero()[:, 0]
        count = min(kept, len(own))
        received_T = states.received[image].masked_fill(read_T, torch.inf)[own]
        important = max(int(count * self.important), reads)
        slots = torch.zeros_like(read_T)
        slots[own[important_and_distinct(states.tokens[image][own], received_T, important, count)]] = True
        slots[newlines[: kept - count]] = True
        return slots
