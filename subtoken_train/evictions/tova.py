"""TOVA (Oren et al., 2024): the entries that the prompt's last row attends to, one set for all heads of a layer.

Source: "Transformers are Multi-State RNNs" (2401.06104) and its released code (``tova_cache.py`` @9c7d09b): attention
of the last row, mean over all query heads; the last entry competes like every other unless ``protect_last`` is set, as
in NVIDIA's kvpress 0.5.4. The paper evicts at every step while decoding, here after ``eviction_every`` tokens, by the
last one's row. The last row is the question's, or without a question the context's own.

Legend: B batch, N cached rows of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from subtoken_train.evictions.base import Eviction
from subtoken_train.functional.gather import last_marked
from subtoken_train.view.scores import Scale, Scores
from subtoken_train.view.view import Need, Online, View


@dataclass(frozen=True)
class TOVA(Eviction):
    """Attention of the last row, mean over the heads.

    Attributes:
        protect_last: the prompt's last entry always stays, inside the budget (kvpress).
    """

    name: ClassVar[str] = "tova"
    absolute: ClassVar[Scale] = Scale(log=True, high=0.0)
    online: ClassVar[Online] = Online(rows=1)
    needs: ClassVar[frozenset[Need]] = frozenset({"rows"})
    heads_share: ClassVar[bool] = True

    protect_last: bool = False

    def score(self, view: View) -> Scores:
        """The last row's attention, [B, 1, N]."""
        scores_B1N = view.rows(view.last_rows(1))[:, :, 0].mean(1, keepdim=True)
        last_BN = last_marked(view.entries_BN, 1) if self.protect_last else torch.zeros_like(view.entries_BN)
        return Scores(scores_B1N, last_BN)
