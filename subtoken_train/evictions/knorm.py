"""Key norm (Devoto et al., 2024): entries whose keys are short stay.

Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression": a small key norm goes with much
attention. What it does not do: no recent window and no sinks are protected, no query is read, all layers have the same
budget (the paper leaves the first layers whole), and nothing is evicted while decoding.

Legend: B batch, N cached rows of the prompt, h key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from subtoken_train.evictions.base import Eviction
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Need, View


@dataclass(frozen=True)
class KNorm(Eviction):
    """Minus the Euclidean norm of the cached (rotated) key, per key-value head."""

    name: ClassVar[str] = "knorm"
    needs: ClassVar[frozenset[Need]] = frozenset({"key_norms"})

    def score(self, view: View) -> Scores:
        """Minus the key norms, [B, h, N]."""
        return Scores(-view.key_norms(), view.entries_BN.new_zeros(view.entries_BN.shape))
