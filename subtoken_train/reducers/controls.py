"""Controls: no reduction, and visual tokens at random or evenly spread over the images, by their place alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.errors import MAX_SEED
from subtoken_train.functional.hashing import uniform_hash
from subtoken_train.reducers.base import RankingReducer, Reducer, Stage
from subtoken_train.view.method import setting
from subtoken_train.view.view import View


@dataclass(frozen=True, kw_only=True)
class NoReducer(Reducer):
    """No reduction: every token stays, and the pipeline skips the gather; ``keep_ratio`` must be 1."""

    name: str = "none"

    stage: ClassVar[Stage] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.acts:
            raise ValueError(f"reducer 'none' keeps every token, but keep_ratio={self.keep_ratio}; set it to 1")


@dataclass(frozen=True, kw_only=True)
class RandomReducer(RankingReducer):
    """Control: visual tokens at random, by a hash of (``seed``, sample, position) that is their ranking too.

    Attributes:
        seed: another one, other tokens.
    """

    name: str = "random"
    seed: int = setting(0, 0, MAX_SEED)

    ranks: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        """Random scores [B, N]; padding must stand on the right for positions to be the sample's own."""
        positions_N = torch.arange(view.regions_BN.shape[1], device=view.regions_BN.device)
        first_B1 = (view.regions_BN != 0).long().argmax(-1, keepdim=True)
        return uniform_hash(view.sample_seed_B[:, None], positions_N - first_B1, self.seed)


GOLDEN = 2654435769  # 2^32 over the golden ratio, rounded


@dataclass(frozen=True, kw_only=True)
class UniformReducer(RankingReducer):
    """Control: visual tokens evenly spread over the images, by their place alone.

    Ranked by the fractional part of their place times the golden ratio, smallest first: gaps between kept places have
    three sizes at most at any budget (Steinhaus), and a smaller budget keeps a part of a larger one. Places are counted
    over all images of a sample, newlines included. It serves every family.
    """

    name: str = "uniform"

    ranks: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        place_BN = view.visual.long().cumsum(-1) - 1
        return -((place_BN * GOLDEN) % 2**32).float() / 2**32
