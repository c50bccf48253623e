"""LOOK-M (Wan et al., 2024): text stays before any visual entry, and what goes is merged into what stays.

Source: "LOOK-M: Look-Once Optimization in KV Cache for Efficient Multimodal Long-Context Inference" (2406.18139) and
its released code (SUSTechBruce/LOOK-M @ecf0f51). H2O's scores and recent share; to text's the largest visual score of
the head is added (twice, so that rounding changes nothing). What a head drops joins the kept entry whose key is most
like its own, by the merge ``pivot`` of ``functional/merging.py`` unless another is asked for. Without an image it is
H2O with merging.

What differs: the budget is exact, where the release keeps all text whatever the budget. It takes 65,516 from visual
scores, which in half precision leaves steps of 32. Its averaging and weighting pair entries with other entries' keys;
neither is offered. While decoding, sums go on as H2O's, generated entries are text, and nothing is merged.

Legend: B batch, N cached rows of the prompt, h key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from subtoken_train.evictions.h2o import H2O
from subtoken_train.functional.merging import Merge
from subtoken_train.types import Region
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import View


@dataclass(frozen=True)
class LookM(H2O):
    """H2O's scores, text first; see ``H2O`` for its settings."""

    name: ClassVar[str] = "look_m"
    merges: ClassVar[Merge] = "pivot"

    def score(self, view: View) -> Scores:
        """H2O's scores, text's raised above all visual ones of the head, [B, h, N]."""
        found = super().score(view)
        visual_B1N = (view.regions_BN == Region.VISUAL)[:, None]
        raised_Bh1 = 2 * found.scores_BhN.masked_fill(~visual_B1N, 0.0).amax(-1, keepdim=True)
        text_B1N = view.entries_BN[:, None] & ~visual_B1N
        return replace(found, scores_BhN=torch.where(text_B1N, found.scores_BhN + raised_Bh1, found.scores_BhN))
