"""Scores of a layer's entries, and the candidates that a budget chooses among; the result is a ``Plan`` (``types.py``).

Legend: B batch, N cached rows of the prompt, h key-value heads, L layers.
"""

import math
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Scores:
    """Scores of one layer's entries, and what a method notes beside them.

    Attributes:
        scores_BhN: the higher, the sooner an entry stays; fp32, [B, h, N], or [B, 1, N] where all heads share a set.
        protected_BN: entries that always stay and count in the budget (a recent window, attention sinks), bool.
        weight_B: the layer's claim on the budget, for methods that divide it between layers; fp32.
        notes: further numbers of a method, by name.
        carried: what it wants to find again at the next look while tokens are decoded: k numbers of each head's
            entries, [B, h * k, N], a head's together; fp32.
    """

    scores_BhN: Tensor
    protected_BN: Tensor
    weight_B: Tensor | None = None
    notes: dict[str, Tensor] = field(default_factory=dict)
    carried: Tensor | None = None


@dataclass
class Candidates:
    """Entries that may be evicted, and how many of them may stay.

    Attributes:
        regions_LBN: ``Region`` codes of every layer's rows (layers can differ in which rows are entries).
        competes_LBN: entries that the method chooses among, bool; all others stay and are not in the budget.
        budget_LB: entries that may stay of them, int64, the same in every layer of a sample unless layers have
            different numbers of entries. A method may move entries between layers, not add any.
        exact_LB: the same before it was rounded to whole entries, fp64; None where it is whole anyway.
        heads: while tokens are decoded, rows of the batch that are heads of one sample.
    """

    regions_LBN: list[Tensor]
    competes_LBN: list[Tensor]
    budget_LB: Tensor
    exact_LB: Tensor | None = None
    heads: int = 1


@dataclass(frozen=True)
class Scale:
    """A scale of scores that mean the same in every prompt, layer and head, so that one number can be their threshold.

    ``log``: a threshold is compared with the natural logarithm of a score; it can meet scores from ``low`` to ``high``.
    """

    log: bool = False
    low: float = -math.inf
    high: float = math.inf

    def read(self, scores: Tensor) -> Tensor:
        """Return the scores that a threshold is compared with, fp32 of the same shape."""
        return scores.float().log() if self.log else scores.float()
