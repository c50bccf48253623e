"""Control: visual tokens evenly spread over the images, by their place alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from subtoken_train.reducers.base import RankingReducer
from subtoken_train.view.view import View

GOLDEN = 2654435769
"""2^32 over the golden ratio, rounded."""


@dataclass(frozen=True, kw_only=True)
class UniformReducer(RankingReducer):
    """Keep visual tokens by the fractional part of their place times the golden ratio: their ranking, smallest first.

    Gaps between kept places have three sizes at most at any budget (Steinhaus), and rows of an image are shifted
    against each other, so that what stays is a lattice on it, not columns; a smaller budget keeps a part of a larger
    one. Places are counted over all images of a sample, newlines included. No feature is read: it serves every family.
    """

    name: str = "uniform"

    ranks: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        """Return minus the fractional parts, [B, N]."""
        place_BN = view.visual.long().cumsum(-1) - 1
        return -((place_BN * GOLDEN) % 2**32).float() / 2**32
