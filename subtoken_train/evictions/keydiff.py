"""KeyDiff (Park et al., 2025): entries whose keys are unlike the prompt's average key stay.

Source: "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
Environments" (2504.15364), in the form of NVIDIA's kvpress 0.5.4: the anchor is the mean of the normalised, rotated
keys of the whole prompt, and an entry scores minus its key's cosine similarity to it.
What it does not do: the whole prompt is read before anything goes (the paper evicts in blocks); no query is read,
nothing is protected, all layers have the same budget, and nothing is evicted while decoding.

Legend: B batch, N cached rows of the prompt, h key-value heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.view.scores import Scale, Scores
from subtoken_train.view.view import View

SHORTEST = 1e-12  # length that a vector has at least where it is divided by its length


@dataclass(frozen=True)
class KeyDiff(Eviction):
    """Minus the cosine similarity of the cached (rotated) key to the prompt's mean direction, per key-value head."""

    name: ClassVar[str] = "keydiff"
    absolute: ClassVar[Scale] = Scale(low=-1.0, high=1.0)

    def score(self, view: View) -> Scores:
        """Minus the similarities, [B, h, N]."""
        return Scores(-anchor_similarity(view.key_BhNd, view.entries_BN), torch.zeros_like(view.entries_BN))


def anchor_similarity(key_BhNd: Tensor, entries_BN: Tensor) -> Tensor:
    """Cosine similarity of every key to the mean of the entries' normalised keys, [B, h, N] in fp32."""
    key_BhNd = key_BhNd.float()
    share_BhN = 1 / key_BhNd.norm(dim=-1).clamp(min=SHORTEST)
    weight_BhN = share_BhN * entries_BN[:, None]  # the anchor's own length divides out
    anchor_Bhd1 = (weight_BhN[:, :, None] @ key_BhNd).transpose(-1, -2)
    length_Bh11 = anchor_Bhd1.norm(dim=-2, keepdim=True).clamp(min=SHORTEST)
    similarity_BhN: Tensor = (key_BhNd @ (anchor_Bhd1 / length_Bh11))[..., 0] * share_BhN
    return similarity_BhN
