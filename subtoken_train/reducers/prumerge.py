"""LLaVA-PruMerge and PruMerge+ (Shang et al., 2024, arXiv:2403.15388): the class token's favourites, merged.

As released (42Shawn/LLaVA-PruMerge, ``clip_encoder.py`` @097c041): in the tower's last layer, queries and keys being of
one head as wide as the layer, the class token's attention ranks the tokens of an image. The best stay; each becomes
itself plus the *sum* of the 32 tokens whose keys are most like its own (cosine), each times its attention. One extra
token is the sum of all dropped ones times their attention. Emitted in the order of the ranking, the extra one last, at
positions counted anew. An image of fewer than 33 tokens, where the release fails, is merged with all others.

By default ``keep_ratio`` fixes the count, the extra token included. ``adaptive``, as released, keeps the outliers,
attention above Q3 + 1.5 (Q3 - Q1), of each image (the release: of the batch), and ``keep_ratio`` is a cap, so that
ledgers are upper bounds; its matched anchor is refused. ``plus`` adds every ``int(int(1 / share) / 3)``-th token from
the first to the last but one. At a fixed count (our reading) the share is the largest that leaves room for them, and
the next best fill what is missing. Without an outlier one token counts as such. A picture in tiles is one image, each
token with its own tile's attention; newlines go first. Towers without a class token are refused.

Legend: T tokens of one image, C tower width, k kept tokens without the extra one.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from subtoken_train.functional.masks import top_indices
from subtoken_train.reducers.base import TowerReducer
from subtoken_train.types import MergedStates, TowerStatistics, VisualStates
from subtoken_train.view.method import by_settings

NEIGHBOURS = 32  # tokens that are added to each kept one


def outliers(received_T: Tensor) -> int:
    """Tokens whose attention is above Q3 + 1.5 (Q3 - Q1)."""
    values_T = received_T.double()
    low, high = values_T.quantile(0.25), values_T.quantile(0.75)
    return int((values_T > high + 1.5 * (high - low)).sum())


def spread_step(share: float) -> int:
    """Distance of the tokens that PruMerge+ takes for a share of outliers in (0, 1]."""
    return max(1, int(int(1 / share) / 3))


def chosen_tokens(received_T: Tensor, best: int, step: int | None) -> Tensor:
    """Indices [k]: the ``best`` in the order of their attention, then of every ``step``-th those that are new."""
    order_T = top_indices(received_T, len(received_T))
    if step is None:
        return order_T[:best]
    spread = torch.arange(0, len(received_T) - 1, step, device=received_T.device)
    return torch.cat([order_T[:best], spread[~torch.isin(spread, order_T[:best])]])


def chosen_count(received_T: Tensor, count: int) -> Tensor:
    """PruMerge+ at exactly ``count`` tokens (0 to T), [count]: the most outliers that leave room for what is spread."""
    tokens, order = len(received_T), top_indices(received_T, len(received_T)).tolist()
    rank = {place: i for i, place in enumerate(order)}
    ranks_of: dict[int, list[int]] = {}  # step -> ranks of the spread tokens, best first
    chosen: list[int] = []
    for best in range(count, 0, -1):
        step = spread_step(best / tokens)
        ranks = ranks_of.setdefault(step, sorted(rank[place] for place in range(0, tokens - 1, step)))
        if best + len(ranks) - bisect_left(ranks, best) <= count:
            chosen = order[:best] + [place for place in range(0, tokens - 1, step) if rank[place] >= best]
            break
    taken = set(chosen)
    missing = [place for place in order if place not in taken][: count - len(chosen)]
    return torch.tensor(chosen + missing, dtype=torch.long, device=received_T.device)


def merged_tokens(tokens_TC: Tensor, received_T: Tensor, keys_Td: Tensor, chosen_k: Tensor) -> Tensor:
    """The chosen tokens, each with its neighbours (by cosine of keys) added, and the extra one, [k + 1, C]; in fp32."""
    states_TC, unit_Td = tokens_TC.float(), F.normalize(keys_Td.float(), dim=-1)
    weighted_TC = states_TC * received_T.float()[:, None]
    with torch.autocast(unit_Td.device.type, enabled=False):
        like_kT = unit_Td[chosen_k] @ unit_Td.T
    like_kT.scatter_(1, chosen_k[:, None], -torch.inf)
    near_kn = top_indices(like_kT, min(NEIGHBOURS, len(tokens_TC) - 1))
    dropped_T = torch.ones_like(received_T, dtype=torch.bool)
    dropped_T[chosen_k] = False
    kept_kC = states_TC[chosen_k] + weighted_TC[near_kn].sum(1)
    return torch.cat([kept_kC, weighted_TC[dropped_T].sum(0, keepdim=True)]).to(tokens_TC.dtype)


@dataclass(frozen=True, kw_only=True)
class PruMerge(TowerReducer):
    """PruMerge with ``keep_ratio`` tokens per image, the extra one among them.

    Attributes:
        plus: PruMerge+, which also takes tokens spread over the image.
        adaptive: each image's outliers say how many stay, at most ``keep_ratio`` of its tokens.
    """

    name: str = "prumerge"
    plus: bool = False
    adaptive: bool = False

    statistics: ClassVar[TowerStatistics] = "unsplit"
    fixed_count = by_settings(lambda self: not self.adaptive)

    @property
    def acts(self) -> bool:
        return self.adaptive or super().acts

    @torch.no_grad()
    def merge(self, states: VisualStates, read: list[Tensor]) -> MergedStates:
        assert states.received is not None
        assert states.keys is not None
        tokens, slots = [], []
        for image, (kept, placeholders_TC) in enumerate(zip(self.image_counts(states), states.tokens, strict=True)):
            if not kept:
                tokens.append(placeholders_TC[:0])
                slots.append(torch.zeros(len(placeholders_TC), dtype=torch.bool, device=placeholders_TC.device))
                continue
            most = kept - 1
            tokens_TC, received_T, keys_Td = placeholders_TC, states.received[image], states.keys[image]
            if states.tiles is not None:
                patch_T = states.tiles[image] >= 0
                if most <= int(patch_T.sum()):  # newlines hold nothing to merge into; they stay where all patches do
                    tokens_TC, received_T, keys_Td = tokens_TC[patch_T], received_T[patch_T], keys_Td[patch_T]
            tokens.append(merged_tokens(tokens_TC, received_T, keys_Td, self._chosen(received_T, most)))
            slots.append(torch.arange(len(placeholders_TC), device=tokens_TC.device) < len(tokens[-1]))
        return MergedStates(tokens, slots)

    def _chosen(self, received_T: Tensor, most: int) -> Tensor:
        tokens = len(received_T)
        if not self.adaptive:
            return chosen_count(received_T, most) if self.plus else chosen_tokens(received_T, most, None)
        share = max(outliers(received_T), int(self.plus)) / tokens
        # the product's own rounding, as released: 100 * 0.29 is 28
        return chosen_tokens(received_T, int(tokens * share), spread_step(share) if self.plus else None)[:most]
