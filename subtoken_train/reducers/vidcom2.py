"""VidCom2, video compression commander (Liu et al., 2025, arXiv:2505.14454): keep more of the frames that stand out.

As released (xuyang-liu16/VidCom2 @944a17d), on projected features, of which the half of the channels that vary least
over the video is read, scaled to length 1: a token's likeness to the mean of the video, and to that of its frame, is a
sum of five Gaussians of the squared distance. A frame's share is r * (1 + p - mean p), p the softmax of minus its mean
likeness to the video, at a temperature of 0.01; in each frame the tokens with the least sum of both stay. For Qwen a
frame is a layer of two.

What differs: the count is exact, as in vLLM (#47750, read in 0.33.0): shares are rounded, at least a token a frame; of
what is too much the most alike tokens leave, what is missing is filled with the least alike. A count below a token a
frame holds here. Kept tokens keep their positions; ties go to the lower index; a prompt with images is refused. The
last token of a prompt that ends with its video stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.functional.diversity import unit_rows
from subtoken_train.reducers.video import VideoReducer

_TEMPERATURE = 0.01
_VARIANCES = (0.125, 0.25, 0.5, 1.0, 2.0)


def likeness(unit_FTD: Tensor, centre_D: Tensor) -> Tensor:
    """Return the sum of Gaussians of each row's distance to a centre, [F, T]."""
    square_FT = (unit_FTD - centre_D).square().sum(-1)
    return torch.stack([(-square_FT / (2 * variance)).exp() for variance in _VARIANCES]).sum(0)


@dataclass(frozen=True, kw_only=True)
class VidCom2(VideoReducer):
    """VidCom2."""

    name: str = "vidcom2"

    def order(self, states_FTD: Tensor) -> Tensor:
        """Return what the frames' shares hold, the least alike first, then all others likewise."""
        _, tokens, width = states_FTD.shape
        steady = states_FTD.flatten(0, 1).var(0, unbiased=False).argsort(stable=True)[: max(1, width // 2)]
        unit_FTD = unit_rows(states_FTD[..., steady])
        to_video_FT = likeness(unit_FTD, unit_FTD.mean((0, 1)))
        alike_FT = to_video_FT + likeness(unit_FTD, unit_FTD.mean(1, keepdim=True))
        unique_F = (-to_video_FT.mean(-1) / _TEMPERATURE).softmax(0)
        share_F = (self.keep_ratio * (1 + unique_F - unique_F.mean())).clamp(max=1)
        count_F = (share_F * tokens).round().clamp(1, tokens)
        place_FT = alike_FT.argsort(dim=-1, stable=True).argsort(-1)
        order = alike_FT.flatten().argsort(stable=True)
        beyond = (place_FT >= count_F[:, None]).flatten()
        return order[beyond[order].int().argsort(stable=True)]
