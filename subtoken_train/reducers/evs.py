"""EVS, efficient video sampling (Bagrov et al., 2025, arXiv:2510.14624): keep of each frame what is new in it.

As vLLM ships it (vllm-project/vllm #22980, read in 0.33.0): a token's dissimilarity is 1 - cosine of its projected
feature to that in the same place of the frame before; the first frame comes first, and in the whole video the most
dissimilar tokens stay, at their own positions. For Qwen a frame is a layer of two.

What differs: the count is exact, so that a small share cuts the first frame's last tokens (keep at least 1 / frames);
distances below 1e-6 are ties, which go to the lower index; a prompt with images is refused, since a sample's budget is
over all that it shows; on Qwen3-VL the input embeddings are compared. The last token of a prompt that ends with its
video stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.functional.diversity import SAME, unit_rows
from subtoken_train.reducers.video import VideoReducer


@dataclass(frozen=True, kw_only=True)
class EVS(VideoReducer):
    """EVS."""

    name: str = "evs"

    def order(self, states_FTD: Tensor) -> Tensor:
        """Return the first frame, then all others' tokens from the most to the least dissimilar."""
        unit_FTD = unit_rows(states_FTD)
        unlike_FT = 1 - (unit_FTD[1:] * unit_FTD[:-1]).sum(-1)
        unlike_FT = torch.cat([torch.full_like(unit_FTD[:1, :, 0], torch.inf), unlike_FT])
        return unlike_FT.masked_fill(unlike_FT < SAME, 0).flatten().argsort(descending=True, stable=True)
