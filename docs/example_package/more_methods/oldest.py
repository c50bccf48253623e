"""An eviction: the first entries of a prompt stay."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from subtoken_train.evictions.base import Eviction
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import View


@dataclass(frozen=True)
class Oldest(Eviction):
    """The first entries of a prompt stay. It reads nothing of the attention."""

    name: ClassVar[str] = "oldest"

    def score(self, view: View) -> Scores:
        """Return scores of all entries, [B, 1, N]; the highest stay."""
        places_N = torch.arange(view.entries_BN.shape[1], device=view.entries_BN.device)
        scores_B1N = -places_N.float().expand(view.entries_BN.shape)[:, None]
        return Scores(scores_B1N, torch.zeros_like(view.entries_BN))
