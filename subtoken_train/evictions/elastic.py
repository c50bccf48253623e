"""Elastic Cache (Liu et al., 2024): entries that gathered most attention stay, as anchors of those that go.

Source: "Efficient Inference of Vision Instruction-Following Models with Elastic Cache" and its released code: an
entry's score is the attention that it receives, summed over all rows, mean over all query heads, one set for a layer;
the first entry and the last stay. A dropped entry is merged into the nearest that stays (the merge ``position`` of
``functional/merging.py``) unless another merge is asked for.
What it does not do: the released code takes ``argsort`` for a rank and so keeps entries by chance (a test shows it);
here the best scores stay, as the paper says. Nothing is evicted while decoding.

Legend: B batch, N cached rows of the prompt, H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.observers import column_sums
from subtoken_train.functional.gather import last_marked
from subtoken_train.functional.merging import Merge
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Need, View


@dataclass(frozen=True)
class Elastic(Eviction):
    """Attention summed over rows and averaged over heads, the ends of the prompt protected.

    Attributes:
        sinks: first entries of the prompt that always stay, inside the budget.
        recent: last entries that always stay, inside the budget where they compete.
    """

    name: ClassVar[str] = "elastic"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks"})
    heads_share: ClassVar[bool] = True
    merges: ClassVar[Merge] = "position"

    sinks: int = setting(1)
    recent: int = setting(1)

    def score(self, view: View) -> Scores:
        """Column sums of the head-mean attention over all rows, [B, 1, N]; the ends are protected."""
        entries_BN = view.entries_BN
        sums_BHN = column_sums(view.blocks(entries_BN))
        ends_BN = entries_BN & (entries_BN.cumsum(-1) <= self.sinks) | last_marked(entries_BN, self.recent)
        return Scores(sums_BHN.mean(1, keepdim=True), ends_BN)
