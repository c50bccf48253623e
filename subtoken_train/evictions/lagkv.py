"""LagKV (Liang et al., 2025): entries that vary most in the terms of the entries that follow them.

Source: "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important" (2504.04704), in the form of
NVIDIA's kvpress 0.5.4. After the sinks the prompt is cut into partitions. The smallest and the largest value of each
channel in the *next* partition are 0 and 1 for this one's keys and values; an entry's spread over the channels, softmax
within the partition, mean of key and value, says how much it stands out. The score is its rank within the partition, or
that number itself (``cross_scoring``). The last whole partition and what follows it stay.
What it does not do: no query is read, all layers have the same budget, nothing is evicted while decoding, and the
prompt is read whole. With fewer than two partitions the latest entries stay. What differs from the release: a channel
that is constant in the next partition is left out, where the release divides by 0.

Legend: B batch, N cached rows of the prompt, h key-value heads, d head width, P partitions, W entries of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Scores
from subtoken_train.view.view import Need, View


@dataclass(frozen=True)
class LagKV(Eviction):
    """Spread of keys and values relative to the next partition; the defaults are the release's.

    Attributes:
        sinks: first entries of the prompt that always stay, inside the budget.
        lag: entries of a partition.
        cross_scoring: entries of all partitions compete by their scores, not by ranks within their own.
    """

    name: ClassVar[str] = "lagkv"
    needs: ClassVar[frozenset[Need]] = frozenset({"values"})

    sinks: int = setting(4)
    lag: int = setting(128, 2)
    cross_scoring: bool = False

    def score(self, view: View) -> Scores:
        """Scores in [0, 1], [B, h, N]; sinks and the last partition on are protected."""
        entries_BN = view.entries_BN
        batch, kv_heads, length, _ = view.key_BhNd.shape
        scores_BhN = torch.zeros(batch, kv_heads, length, device=entries_BN.device)
        protected_BN = torch.zeros_like(entries_BN)
        for sample, entries_N in enumerate(entries_BN):  # partitions begin at each sample's own entries
            rows_n = entries_N.nonzero()[:, 0]
            states = [each[sample].index_select(1, rows_n).float() for each in (view.key_BhNd, view.value_BhNd)]
            scores_hn, protected_n = self._score_sample(*states)
            scores_BhN[sample][:, rows_n] = scores_hn
            protected_BN[sample][rows_n] = protected_n
        return Scores(scores_BhN, protected_BN)

    def _score_sample(self, key_hnd: Tensor, value_hnd: Tensor) -> tuple[Tensor, Tensor]:
        kv_heads, length, _ = key_hnd.shape
        place_n = torch.arange(length, device=key_hnd.device)
        partitions = (length - self.sinks) // self.lag
        if partitions < 2:
            late_n = (place_n - self.sinks) / max(length - self.sinks, 1)
            return late_n.clamp(min=0).expand(kv_heads, -1), place_n < self.sinks
        body = slice(self.sinks, self.sinks + partitions * self.lag)
        of_key, of_value = (
            lag_spread(each[:, body].reshape(kv_heads, partitions, self.lag, -1)).softmax(-1)
            for each in (key_hnd, value_hnd)
        )
        scores_hPW = (of_key + of_value) / 2
        if not self.cross_scoring:
            scores_hPW = scores_hPW.argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag
        scores_hn = torch.ones(kv_heads, length, device=key_hnd.device)
        scored = slice(self.sinks, self.sinks + (partitions - 1) * self.lag)
        scores_hn[:, scored] = scores_hPW.flatten(1)
        return scores_hn, (place_n < scored.start) | (place_n >= scored.stop)


def lag_spread(states_hPWd: Tensor) -> Tensor:
    """Standard deviation over the channels in terms of the next partition's extremes, [h, P - 1, W]."""
    low, high = states_hPWd[:, 1:].aminmax(dim=2, keepdim=True)
    span = high - low
    told = span > 0
    relative = ((states_hPWd[:, :-1] - low) / span).masked_fill(~told, 0.0)
    count = told.sum(-1)
    mean = (relative.sum(-1) / count.clamp(min=1))[..., None]
    variance = ((relative - mean).square() * told).sum(-1) / (count - 1).clamp(min=1)
    return variance.sqrt()
