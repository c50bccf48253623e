"""A sliding window: a row sees what stands less than ``size`` positions before it, and itself.

Positions are those of the whole prompt, whatever was dropped since: a window of 4,096 positions may hold few rows.

Legend: B batch, N rows (or columns), q rows of a query.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


def in_window(row_position: Tensor, column_position: Tensor, size: int) -> Tensor:
    """Mark the columns that lie in each row's window, bool [..., q, N], from their positions [..., q] and [..., N].

    What stands after a row is in its window too; causality is the caller's.
    """
    return row_position[..., :, None] - column_position[..., None, :] < size


@dataclass(frozen=True)
class SlidingWindow:
    """Rows of a batch in a layer that attends in a window.

    Attributes:
        size: positions that a row sees, its own included.
        position_BN: of every row.
    """

    size: int
    position_BN: Tensor

    def of_rows(self, first: int, stop: int, left: int = 0) -> Tensor:
        """Mark rows ``left`` to ``stop`` that lie in the windows of rows ``first`` to ``stop``, bool [B, q, N]."""
        return in_window(self.position_BN[:, first:stop], self.position_BN[:, left:stop], self.size)

    def of_index(self, index_BW: Tensor) -> Tensor:
        """Mark the rows that lie in the windows of chosen ones, bool [B, W, N]."""
        position_BN = self.position_BN.to(index_BW.device)
        return in_window(position_BN.gather(1, index_BW), position_BN, self.size)
