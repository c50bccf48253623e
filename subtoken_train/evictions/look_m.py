"""LOOK-M (Wan et al., 2024): text stays before any visual entry, and what goes is merged into what stays.

Source: "LOOK-M: Look-Once Optimization in KV Cache for Efficient Multimodal Long-Context Inference" (2406.18139) and
its released code (SUSTechBruce/LOOK-M @ecf0f51). H2O's scores and recent share; to text's the largest visual score of
the head is added, so that visual entries go first. What a head drops joins the kept entry whose key is most like its
own, by the merge ``pivot`` of ``functional/merging.py``, the paper's best, unless another is asked for (``average``,
``weighted``, or ``none``). Without an image nothing is added, and this is H2O with merging.

What differs: the largest visual score is added twice, so that rounding leaves text before vision. The release keeps all
text even where the budget is less; here the budget is exact, and text competes where the scope is ``all``. It takes
65,516 from visual scores instead, which in half precision leaves steps of 32, so that it keeps visual entries by chance
(in fp32 a test compares sets). Its averaging and weighting merge those dropped entries alone that are more like a kept
one than the mean, and its averaging then pairs them with other entries' keys; neither is offered.
While decoding, sums go on as H2O's, generated entries are text, and nothing is merged.

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
