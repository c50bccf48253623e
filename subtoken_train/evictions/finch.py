"""Finch (Corallo & Papotti, 2024): entries that the question attends to, its rows weighted by how much they could see.

Source: "FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models" (2408.00167), its release
(giulio98/context-compression) and NVIDIA's kvpress 0.5.4. The score is the attention of the question's rows, each times
the number of entries up to it, mean over the rows and a group's query heads. The question is where the prompt's regions
say; its entries stay. Prompts without one, and contexts compressed before their question, are refused.

What differs: a set per key-value head, as in kvpress (one for all heads in the paper); a row counts itself among what
it sees, as in the paper. Both turn what stays to closed-up positions, which is ``rerotate: true`` here.
What it does not do: the context is not read in pieces; a sliding window is not counted out of what a row sees; nothing
is evicted while decoding.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.observers import column_sums, over_groups, task_rows
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Need, View


@dataclass(frozen=True)
class Finch(Eviction):
    """Attention of the question.

    Attributes:
        normalise: weight every row by the number of entries up to it.
    """

    name: ClassVar[str] = "finch"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks"})
    needs_question: ClassVar[bool] = True

    normalise: bool = True

    def score(self, view: View) -> Scores:
        """Weighted attention of the question's rows, [B, h, N], 0 for its own entries, which are protected."""
        asking_BN = task_rows(view.regions_BN)
        weight_BN = view.entries_BN.cumsum(-1).float() if self.normalise else None
        sums_BHN = column_sums(view.blocks(asking_BN), weight_BN) / asking_BN.sum(-1).clamp(min=1)[:, None, None]
        scores_BhN = over_groups(sums_BHN, view.key_BhNd.shape[1])
        return Scores(scores_BhN.masked_fill(asking_BN[:, None], 0.0), asking_BN)
