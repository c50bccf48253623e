"""Control: visual tokens at random, reproducible per sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.errors import MAX_SEED, check_range
from subtoken_train.functional.hashing import uniform_hash
from subtoken_train.reducers.base import RankingReducer
from subtoken_train.view.view import View


@dataclass(frozen=True, kw_only=True)
class RandomReducer(RankingReducer):
    """Uniform scores from a hash of (``seed``, sample, position); they are its ranking too.

    Attributes:
        seed: another one, other tokens.
    """

    name: str = "random"
    seed: int = 0

    ranks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("reducer seed", self.seed, 0, MAX_SEED)

    def scores(self, view: View) -> Tensor:
        """Random scores [B, N]; padding must stand on the right for positions to be the sample's own."""
        positions_N = torch.arange(view.regions_BN.shape[1], device=view.regions_BN.device)
        first_B1 = (view.regions_BN != 0).long().argmax(-1, keepdim=True)
        return uniform_hash(view.sample_seed_B[:, None], positions_N - first_B1, self.seed)
