"""Control: entries at random, in every layer and head anew.

The scores are a hash of (seed, layer, head, place among the sample's entries), so that they are the same in every run
and any batch. What it does not do: two prompts of the same length keep the same places, since nothing names a sample.

Legend: B batch, N cached rows of the prompt, h key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from subtoken_train.evictions.base import Eviction
from subtoken_train.functional.hashing import uniform_hash
from subtoken_train.view.scores import Scale, Scores
from subtoken_train.view.view import View


@dataclass(frozen=True)
class RandomEviction(Eviction):
    """Uniform random scores.

    Attributes:
        seed: which random choice.
    """

    name: ClassVar[str] = "random"
    absolute: ClassVar[Scale] = Scale(low=0.0, high=1.0)

    seed: int = 0

    def score(self, view: View) -> Scores:
        """Random scores in [0, 1), [B, h, N]."""
        place_BN = view.entries_BN.cumsum(-1)
        heads_h1 = torch.arange(view.key_BhNd.shape[1], device=place_BN.device)[:, None]
        scores_BhN = uniform_hash(heads_h1, place_BN[:, None], view.layer, self.seed)
        return Scores(scores_BhN, view.entries_BN.new_zeros(view.entries_BN.shape))
