"""CurDKV (Sengupta et al., 2025): entries whose keys and values have much leverage among their neighbours.

Source: "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition" (2509.15038), its authors' press, and
NVIDIA's kvpress 0.5.4, whose defaults these are. The leverage of a key, and of a value, is its squared norm as a share
of that of its window of 16 entries; the score is their product, over the sum of a head's.

What it does not do: norms are not estimated from a Gaussian sketch (off by default in the presses), no query is read,
all layers have the same budget, and nothing is evicted while decoding. What differs from the press: a window of zeros
gives 0, where the press divides by 0; windows begin at a prompt's own first entry.

Legend: B batch, N cached rows of the prompt, h key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Need, View

Leverage = Literal["product", "mean", "key", "value"]


@dataclass(frozen=True)
class CUR(Eviction):
    """Leverage of keys and values.

    Attributes:
        sinks: first entries of the prompt that always stay, inside the budget.
        leverage: ``product`` or ``mean`` of a key's and a value's, or one of them.
        local: entries of a window; 0: squared norms of the whole prompt compete as they are.
    """

    name: ClassVar[str] = "cur"
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    sinks: int = setting(4)
    leverage: Leverage = "product"
    local: int = setting(16)

    def score(self, view: View) -> Scores:
        """Shares of a head's leverage, [B, h, N]; the sinks are protected."""
        place_BN = view.entries_BN.cumsum(-1) - 1
        key_BhN, value_BhN = (
            leverage(states, view.entries_BN, place_BN, self.local) for states in (view.key_BhNd, view.value_BhNd)
        )
        joined = {"product": key_BhN * value_BhN, "mean": (key_BhN + value_BhN) / 2, "key": key_BhN, "value": value_BhN}
        scores_BhN = joined[self.leverage]
        share_BhN = scores_BhN / scores_BhN.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        return Scores(share_BhN, view.entries_BN & (place_BN < self.sinks))


def leverage(states_BhNd: Tensor, entries_BN: Tensor, place_BN: Tensor, local: int) -> Tensor:
    """Squared norms, [B, h, N] in fp32, 0 where nothing is: as shares of their window's, or as they are.

    Args:
        local: entries of a window; 0: no window.
    """
    square_BhN = states_BhNd.float().square().sum(-1).masked_fill(~entries_BN[:, None], 0.0)
    if not local:
        return square_BhN
    window_BhN = (place_BN.clamp(min=0) // local)[:, None].expand_as(square_BhN)
    total_BhN = torch.zeros_like(square_BhN).scatter_add(-1, window_BhN, square_BhN).gather(-1, window_BhN)
    return (square_BhN / total_BhN).masked_fill(total_BhN == 0, 0.0)
