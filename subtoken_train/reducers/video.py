"""Base of reducers that choose among the frames of videos.

Legend: B batch, N positions, F frames of one video, T visual tokens of a frame, D model width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.reducers.base import RankingReducer, shared_out
from subtoken_train.view.view import View


class VideoReducer(RankingReducer, ABC):
    """Chooses in each video by itself; a sample's videos share its count by their tokens, exactly.

    It is for videos, and for families that tell their frames (``Family.tells_frames``): an image is refused. What
    stands behind the last frame (LLaVA-OneVision's newline) stays, unless the video keeps one token in all.
    """

    reads_frames: ClassVar[bool] = True

    @abstractmethod
    def order(self, states_FTD: Tensor) -> Tensor:
        """Return a video's tokens in the order in which they stay, indices [F * T] of frame after frame."""

    def scores(self, view: View) -> Tensor:
        """Return scores above 0 for what stays, [B, N]: the first of each video's ``order``."""
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
