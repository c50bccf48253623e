"""A token reducer: the first visual tokens stay, or the last."""

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.reducers.base import RankingReducer
from subtoken_train.view.view import View


@dataclass(frozen=True, kw_only=True)
class Leading(RankingReducer):
    """The first visual tokens of a sample stay, or the last.

    Attributes:
        last: keep the last ones.
    """

    name: str = "leading"
    last: bool = False

    def scores(self, view: View) -> Tensor:
        """Return scores of all tokens, [B, N]; the highest stay."""
        places_N = torch.arange(view.regions_BN.shape[1], device=view.regions_BN.device).float()
        return (places_N if self.last else -places_N).expand(view.regions_BN.shape)
