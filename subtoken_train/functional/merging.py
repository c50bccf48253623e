"""Merging of entries that are dropped into entries that stay: where each one goes, and the mean that stands there.

Source: Elastic Cache (Liu et al., 2024): every dropped entry goes to the nearest entry that stays, and keys and values
become the mean over what was joined, the entry itself included. As released, rotated keys are averaged as they are.

Legend: B batch, N cached rows of the prompt, h key-value heads (1: one set for all heads), d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def nearest_anchor(anchors_BhN: Tensor, entries_BN: Tensor) -> Tensor:
    """The row of the anchor that is nearest to every row, int64 [B, h, N]; an anchor's is its own.

    Distances are counted in entries, so neither padding nor rows that are no entries come between; ties go to the
    earlier anchor. Rows that are no entries, and all rows of a head without an anchor, go to themselves.

    Args:
        anchors_BhN: entries that take others, bool.
        entries_BN: rows that are entries of the cache, bool.
    """
    length = entries_BN.shape[-1]
    rows_N = torch.arange(length, device=entries_BN.device)
    place_B1N = entries_BN.cumsum(-1)[:, None]
    anchors_BhN = anchors_BhN & entries_BN[:, None]
    before_BhN = torch.where(anchors_BhN, rows_N, -1).cummax(-1).values
    after_BhN = torch.where(anchors_BhN, rows_N, length).flip(-1).cummin(-1).values.flip(-1)
    place_BhN = place_B1N.expand_as(anchors_BhN)
    far = 2 * length  # farther than any anchor
    back_BhN = place_BhN - place_BhN.gather(-1, before_BhN.clamp(min=0))
    ahead_BhN = place_BhN.gather(-1, after_BhN.clamp(max=length - 1)) - place_BhN
    back_BhN = back_BhN.masked_fill(before_BhN < 0, far)
    ahead_BhN = ahead_BhN.masked_fill(after_BhN == length, far)
    nearest_BhN = torch.where(back_BhN <= ahead_BhN, before_BhN, after_BhN)
    lonely_BhN = ~entries_BN[:, None] | ((back_BhN == far) & (ahead_BhN == far))
    return torch.where(lonely_BhN, rows_N, nearest_BhN)


def joined_means(states_BhNd: Tensor, target_BhN: Tensor) -> Tensor:
    """Every row's mean over the rows that go to it, [B, h, N, d] in the states' dtype; the mean is taken in fp32.

    A row that none goes to, not even itself, stays as it is.

    Args:
        states_BhNd: keys or values.
        target_BhN: the row that each row goes to, int64; [B, 1, N] where heads share it.
    """
    target_BhN = target_BhN.expand(states_BhNd.shape[:3])
    index = target_BhN[..., None].expand_as(states_BhNd)
    sums = torch.zeros(states_BhNd.shape, dtype=torch.float32, device=states_BhNd.device)
    sums = sums.scatter_add(2, index, states_BhNd.float())
    count_BhN = torch.zeros_like(target_BhN).scatter_add(2, target_BhN, torch.ones_like(target_BhN))
    joined = (sums / count_BhN.clamp(min=1)[..., None]).to(states_BhNd.dtype)
    return torch.where((count_BhN > 0)[..., None], joined, states_BhNd)
