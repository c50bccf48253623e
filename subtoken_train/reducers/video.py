"""Reducers that choose among the frames of videos: EVS and VidCom2.

Legend: B batch, N positions, F frames of one video, T visual tokens of a frame, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.functional.diversity import SAME, unit_rows
from subtoken_train.reducers.base import RankingReducer, shared_out
from subtoken_train.view.view import View


class VideoReducer(RankingReducer, ABC):
    """Chooses in each video by itself; a sample's videos share its count by their tokens, exactly.

    For families that tell their frames (``Family.tells_frames``): an image is refused. What stands behind the last
    frame (LLaVA-OneVision's newline) stays, unless the video keeps one token in all.
    """

    reads_frames: ClassVar[bool] = True

    @abstractmethod
    def order(self, states_FTD: Tensor) -> Tensor:
        """Return a video's tokens in the order in which they stay, indices [F * T] of frame after frame."""

    def scores(self, view: View) -> Tensor:
        """Scores above 0 for what stays, [B, N]: the first of each video's ``order``."""
        score_BN = torch.zeros(view.visual.shape, dtype=torch.int64, device=view.hidden_BND.device)
        for sample, videos in enumerate(view.videos()):
            if not videos:
                continue
            rows = view.visual[sample].nonzero()[:, 0]
            sizes = [video.total for video in videos]
            counts = shared_out(sizes, self.kept_tokens(len(rows)))
            for video, own, count in zip(videos, torch.split(rows, sizes), counts, strict=True):
                shown, after = own[: video.total - video.after], own[video.total - video.after :]
                states_FTD = view.hidden_BND[sample, shown].float().reshape(video.number, video.tokens, -1)
                order = shown[self.order(states_FTD)]
                first = max(min(count, 1), count - video.after)
                order = torch.cat([order[:first], after, order[first:]])
                score_BN[sample, order] = count - torch.arange(len(order), device=order.device)
        return score_BN


@dataclass(frozen=True, kw_only=True)
class EVS(VideoReducer):
    """EVS, efficient video sampling (Bagrov et al., 2025, arXiv:2510.14624): keep of each frame what is new in it.

    As vLLM ships it (vllm-project/vllm #22980, read in 0.33.0): a token's dissimilarity is 1 - cosine of its projected
    feature to that in the same place of the frame before; the first frame comes first, and in the whole video the most
    dissimilar tokens stay, at their own positions. For Qwen a frame is a layer of two. The count is exact, so that a
    small share cuts the first frame's last tokens; distances below 1e-6 are ties, which go to the lower index; a prompt
    with images is refused; on Qwen3-VL the input embeddings are compared. The last token of a prompt that ends with its
    video stays.
    """

    name: str = "evs"

    def order(self, states_FTD: Tensor) -> Tensor:
        unit_FTD = unit_rows(states_FTD)
        unlike_FT = 1 - (unit_FTD[1:] * unit_FTD[:-1]).sum(-1)
        unlike_FT = torch.cat([torch.full_like(unit_FTD[:1, :, 0], torch.inf), unlike_FT])
        return unlike_FT.masked_fill(unlike_FT < SAME, 0).flatten().argsort(descending=True, stable=True)


_TEMPERATURE = 0.01
_VARIANCES = (0.125, 0.25, 0.5, 1.0, 2.0)


def likeness(unit_FTD: Tensor, centre_D: Tensor) -> Tensor:
    """Return the sum of Gaussians of each row's distance to a centre, [F, T]."""
    square_FT = (unit_FTD - centre_D).square().sum(-1)
    return torch.stack([(-square_FT / (2 * variance)).exp() for variance in _VARIANCES]).sum(0)


@dataclass(frozen=True, kw_only=True)
class VidCom2(VideoReducer):
    """VidCom2, video compression commander (Liu et al., 2025, arXiv:2505.14454): keep more of frames that stand out.

    As released (xuyang-liu16/VidCom2 @944a17d), on projected features, of which the half of the channels that vary
    least over the video is read, scaled to length 1: a token's likeness to the mean of the video, and to that of its
    frame, is a sum of five Gaussians of the squared distance. A frame's share is r * (1 + p - mean p), p the softmax of
    minus its mean likeness to the video, at a temperature of 0.01; in each frame the tokens with the least sum of both
    stay. For Qwen a frame is a layer of two. The count is exact, as in vLLM (#47750, read in 0.33.0): shares are
    rounded, at least a token a frame; of what is too much the most alike tokens leave, what is missing is filled with
    the least alike. Kept tokens keep their positions; ties go to the lower index; a prompt with images is refused. The
    last token of a prompt that ends with its video stays.
    """

    name: str = "vidcom2"

    def order(self, states_FTD: Tensor) -> Tensor:
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
