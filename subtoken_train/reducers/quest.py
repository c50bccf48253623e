"""Quest (Tang et al., 2024) as the sub-token paper uses it: one-shot, physical eviction of context pages.

In every layer the same number of tokens stays; which ones, each layer decides for all its heads together: pages by the
mean, over query rows and heads, of Quest's upper bound on the attention logit. The last ``window`` context tokens
always stay, inside the budget, half of which they are at most. Original Quest keeps all pages and chooses anew at every
step (the eviction ``quest_steps``); the paper's peak-memory figures fit the reading taken here. The budget is met to
the token: of the last page that is taken, the latest tokens stay, whose states have read the page's earlier ones.

Legend: B batch, N positions, H query heads, h key-value heads, Q query rows, d head width, P pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.kernels.storage import page_bound
from subtoken_train.reducers.base import ContextReducer
from subtoken_train.view.method import setting
from subtoken_train.view.view import Need, View


def page_index(context_BN: Tensor, page_size: int) -> Tensor:
    """Page of every context token, [B, N] int64: ``page_size`` consecutive context tokens each; -1 elsewhere."""
    ordinal_BN = context_BN.long().cumsum(-1) - 1
    return torch.where(context_BN, ordinal_BN // page_size, -1)


def page_bounds(key_BhNd: Tensor, page_BN: Tensor, num_pages: int) -> tuple[Tensor, Tensor]:
    """Channel-wise minimum and maximum of the (rotated) keys of each page, [B, h, P, d] in fp32; none: +-inf."""
    batch, heads, _, width = key_BhNd.shape
    slot = page_BN.masked_fill(page_BN < 0, num_pages)[:, None, :, None].expand_as(key_BhNd)
    empty = key_BhNd.new_full((batch, heads, num_pages + 1, width), torch.inf, dtype=torch.float32)
    low = empty.scatter_reduce(2, slot, key_BhNd.float(), "amin")
    high = (-empty).scatter_reduce(2, slot, key_BhNd.float(), "amax")
    return low[:, :, :num_pages], high[:, :, :num_pages]


def page_scores(query_BHQd: Tensor, asks_BQ: Tensor, low_BhPd: Tensor, high_BhPd: Tensor) -> Tensor:
    """Mean over query rows and heads of Quest's upper bound sum_d max(q_d * low_d, q_d * high_d), [B, P] in fp32.

    The bound is linear in the positive and the negative part of q, so rows (those of ``asks_BQ``) and the query heads
    of a group are averaged before they meet a page. Unscaled, as released. Pages that a sample does not have score NaN
    or infinity; the choice masks them.
    """
    kv_heads = low_BhPd.shape[1]
    weight_BQ = asks_BQ.float() / asks_BQ.sum(-1, keepdim=True).clamp(min=1)
    query = query_BHQd.float().reshape(len(query_BHQd), kv_heads, -1, *query_BHQd.shape[2:])
    with torch.autocast(query.device.type, enabled=False):  # training must choose the pages that inference chooses
        positive_Bhd = torch.einsum("bhgqd,bq->bhd", query.clamp(min=0), weight_BQ) / query.shape[2]
        negative_Bhd = torch.einsum("bhgqd,bq->bhd", query.clamp(max=0), weight_BQ) / query.shape[2]
        return page_bound(positive_Bhd, negative_Bhd, low_BhPd, high_BhPd).mean(1)


def keep_by_page(scores_BP: Tensor, context_BN: Tensor, page_size: int, count_B: Tensor, window_B: Tensor) -> Tensor:
    """Mark the context tokens that stay, bool [B, N]: exactly ``count_B`` of each sample.

    The last ``window_B`` come first, then page after page by score (ties: the lower page), of a page the latest tokens
    first. ``scores_BP`` of pages that a sample does not have may be anything.
    """
    lowest = torch.finfo(torch.float32).min  # a page that scores -inf still comes before what is none
    ordinal_BN = context_BN.long().cumsum(-1) - 1
    free_B1 = ordinal_BN[:, -1:] + 1 - window_B[:, None]  # tokens before the window, which pages compete with
    first_P = torch.arange(scores_BP.shape[1], device=scores_BP.device) * page_size
    size_BP = (free_B1 - first_P).clamp(min=0, max=page_size)
    ranked_BP = scores_BP.clamp(min=lowest).masked_fill(size_BP == 0, -torch.inf)
    order_BP = ranked_BP.sort(dim=-1, descending=True, stable=True).indices
    sorted_BP = size_BP.gather(-1, order_BP)
    before_BP = torch.empty_like(sorted_BP).scatter_(-1, order_BP, sorted_BP.cumsum(-1) - sorted_BP)
    page_BN = ordinal_BN.clamp(min=0) // page_size
    end_BN = torch.minimum((page_BN + 1) * page_size, free_B1)
    place_BN = before_BP.gather(-1, page_BN) + end_BN - 1 - ordinal_BN
    return context_BN & ((ordinal_BN >= free_B1) | (place_BN < (count_B - window_B)[:, None]))


@dataclass(frozen=True, kw_only=True)
class Quest(ContextReducer):
    """Quest.

    Attributes:
        page_size: tokens per page.
        window: last context tokens that always stay, inside the budget, and half of it at most.
    """

    name: str = "quest"
    needs: ClassVar[frozenset[Need]] = frozenset({"asks"})

    page_size: int = setting(16, 1)
    window: int = setting(64)

    @property
    def words(self) -> str:
        return f"pages of {self.page_size}, window {self.window}"

    def protected_tokens(self, kept: int) -> int:
        """Return the context's last of ``kept`` tokens that stay: the window, or half of ``kept``, rounded down."""
        return min(self.window, kept // 2)

    @torch.no_grad()
    def keep_context(self, view: View) -> Tensor:
        tokens, context_BN, asks_BN = view.scope_counts, view.in_scope_BN, view.asks_BN
        if any(count and not asking for count, asking in zip(tokens, view.asks_counts, strict=True)):
            raise ValueError("quest: a sample has context but a query region of zero tokens; nothing can choose pages")
        counts = [self.kept_tokens(count) if count else 0 for count in tokens]
        windows = [self.protected_tokens(count) for count in counts]
        page_BN = page_index(context_BN, self.page_size)
        low_BhPd, high_BhPd = page_bounds(view.key_BhNd, page_BN, max(math.ceil(max(tokens) / self.page_size), 1))
        scores_BP = page_scores(view.query_BHNd, asks_BN, low_BhPd, high_BhPd)
        count_B, window_B = torch.tensor([counts, windows], device=context_BN.device)
        return keep_by_page(scores_BP, context_BN, self.page_size, count_B, window_B)
