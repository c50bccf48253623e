"""Finch (Corallo & Papotti, 2024): entries that the question attends to, its rows weighted by how much they could see.

Source: "FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models" (2408.00167), its release
(giulio98/context-compression) and NVIDIA's kvpress 0.5.4 (``finch_press.py``), by the same authors. Attention of the
question's rows, each times the number of entries up to it (a row that sees more divides its attention among more),
mean over the rows and over the query heads of a group. Nothing is pooled, and the question's own entries stay.
kvpress finds the question behind a delimiter token; here a prompt's regions say where it is. Without a question there
is nothing to score by: such prompts, and contexts that are compressed before they are asked about, are refused.

What differs: the paper keeps one set for all heads, here every key-value head has its own, as in kvpress; the paper and
its release count the entries that a row sees, itself among them, and kvpress those before it. Both turn what stays to
closed-up positions, which is ``rerotate: true`` here, an option of every eviction.
What it does not do: the paper reads the context in pieces, each with the question behind it and with what stayed of the
pieces before in front; here the context runs whole. In a layer with a sliding window, entries that a row is too far
from are counted. Nothing is evicted while decoding.

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
