"""EVS, efficient video sampling (Bagrov et al., 2025, arXiv:2510.14624): keep of each frame what is new in it.

As vLLM ships it (vllm-project/vllm #22980, read in 0.33.0, ``vllm/multimodal/video_prune/evs.py``): a token's
dissimilarity is 1 - cosine of its projected feature to that in the same place of the frame before; the first frame
comes before all others, and in the whole video the most dissimilar tokens stay, at their own positions. No attention is
read, nor the question. For Qwen a frame is a layer of two.

What differs: the count is exact. vLLM keeps the first frame whole even where the share holds less; here its last tokens
leave then, in raster order, as all do of a video of one frame: keep at least 1 / frames. Cosines are taken in fp32, and
distances below 1e-6 are ties, which go to the lower index. vLLM leaves a prompt's images whole; here they are refused,
since a sample's budget is over all that it shows. On Qwen3-VL vLLM compares deep-stacked features, too; here it is the
input embeddings. The last token of a prompt that ends with its video stays, in place of the last one that is chosen.
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
