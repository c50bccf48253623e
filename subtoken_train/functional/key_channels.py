"""Choose the channels of a head's keys that stay: those where the last queries and the kept keys have most energy.

Source: ThinK (Xu et al., 2024), as released (``SalesforceAIResearch/ThinK``, ``key_pruner_query_driven``): a channel's
score is the mean of q_d^2 over the last rows and the group's heads times the mean of k_d^2 over the cached keys, both
rotated.

Legend: B batch, N cached rows of the prompt, M kept entries, H query heads, h key-value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from subtoken_train.functional.gather import take_rows

BLOCK = 4096  # entries whose squares exist at a time


def query_energy(query_BHNd: Tensor, rows_BN: Tensor, kv_heads: int) -> Tensor:
    """Mean square of the marked rows' queries in each channel of a key-value head, [B, h, d]; 0 without rows."""
    mean_BHd = asking(query_BHNd, rows_BN).square().sum(1) / rows_BN.sum(-1).clamp(min=1)[:, None, None]
    return mean_BHd.view(len(mean_BHd), kv_heads, -1, mean_BHd.shape[-1]).mean(2)


def asking(query_BHNd: Tensor, rows_BN: Tensor) -> Tensor:
    """Return the queries of the marked rows, [B, W, H, d] in fp32; a sample with fewer than W has zeros behind them."""
    places_BW = rows_BN.int().argsort(dim=-1, descending=True, stable=True)[:, : int(rows_BN.sum(-1).max())]
    asks_BW = rows_BN.gather(1, places_BW)
    return take_rows(query_BHNd.transpose(1, 2), places_BW).float() * asks_BW[..., None, None]


def key_energy(key_BhNd: Tensor, rows_BM: Tensor, kept_BhM: Tensor) -> Tensor:
    """Mean square of each head's kept keys in each channel, [B, h, d] in fp32; 0 where a head keeps none.

    ``kept_BhM``: heads that keep the entry, bool; [B, 1, M] where all do alike.
    """
    total = key_BhNd.new_zeros(key_BhNd[:, :, 0].shape, dtype=torch.float32)
    for key, marks in in_blocks(key_BhNd, rows_BM, kept_BhM):
        total += (key.square() * marks).sum(2)
    return total / kept_BhM.sum(-1).clamp(min=1)[..., None]


def in_blocks(key_BhNd: Tensor, rows_BM: Tensor, kept_BhM: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some entries' keys after others, [B, h, m, d] in fp32, and which of them heads keep, [B, h, m, 1]."""
    for start in range(0, rows_BM.shape[1], BLOCK):
        index_BM = rows_BM[:, start : start + BLOCK]
        key = key_BhNd.gather(2, index_BM[:, None, :, None].expand(-1, key_BhNd.shape[1], -1, key_BhNd.shape[3]))
        yield key.float(), kept_BhM[:, :, start : start + BLOCK, None]


def best_channels(scores_Bhd: Tensor, count: int) -> Tensor:
    """The ``count`` channels of the highest scores, bool [B, h, d]; ties go to the lower channel."""
    order = scores_Bhd.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores_Bhd, dtype=torch.bool).scatter(-1, order[..., :count], True)
