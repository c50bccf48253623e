"""Which stored entries and tail tokens new tokens see in a layer with a sliding window: by their positions.

Legend: B batch, R rows of a block, M entries of a part, T tail tokens, N = all entries of a row and its tail, G query
rows of a head (of q new tokens, the newest last, tokens fastest).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.kernels.storage import Block


@dataclass(frozen=True)
class Reach:
    """A window over a cache.

    Attributes:
        size: positions that a token sees, its own included.
        first_B: position of each sample's first tail place; those that follow count on.
    """

    size: int
    first_B: Tensor

    def of_rows(self, rows: Tensor | None, heads: int = 1) -> Reach:
        """That of a block's rows, which are samples, or ``heads`` heads of each; None: of all."""
        first_R = self.first_B if heads == 1 else self.first_B.repeat_interleave(heads)
        return Reach(self.size, first_R if rows is None else first_R[rows])

    def hidden(self, block: Block, tail: int, own_q: Tensor, columns: int) -> Tensor:
        """What the query rows of a block do not see for the window's sake, bool [R, 1, N, G].

        Args:
            block: whose parts have positions.
            tail: T.
            own_q: places of the q new tokens in the tail.
            columns: G.
        """
        first_R1 = self.first_B[:, None]
        places_T = torch.arange(tail, device=first_R1.device)
        stored = [part.position_RM for part in block.parts if part.position_RM is not None]
        position_RN = torch.cat([*stored, first_R1 + places_T], 1)
        own_RG = first_R1 + own_q.repeat(columns // len(own_q))
        return (own_RG[:, None, None] - position_RN[:, None, :, None]) >= self.size
