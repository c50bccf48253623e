"""Quest (Tang et al., 2024) as the sub-token paper uses it: one-shot, physical eviction of whole context pages.

In every layer the same number of pages stays; which ones, each layer decides for itself, for all its heads together: by
the mean, over query rows and heads, of Quest's upper bound on the attention logit. The pages of the last ``window``
context tokens always stay, inside the budget. Original Quest keeps all pages in memory and chooses anew at every step
and head; the paper's peak-memory figures fit the reading taken here (512 and 256 of 2,048 tokens in all layers).

Legend: B batch, N positions, H query heads, h key-value heads, Q query rows, d head width, P pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.errors import MAX_TOKENS, check_range
from subtoken_train.functional.gather import keep_best
from subtoken_train.functional.page_bound import page_bound
from subtoken_train.reducers.context import ContextReducer, ContextView


def page_index(context_BN: Tensor, page_size: int) -> Tensor:
    """Page of every context token, [B, N] int64: ``page_size`` consecutive context tokens each; -1 elsewhere."""
    ordinal_BN = context_BN.long().cumsum(-1) - 1
    return torch.where(context_BN, ordinal_BN // page_size, -1)


def page_bounds(key_BhNd: Tensor, page_BN: Tensor, num_pages: int) -> tuple[Tensor, Tensor]:
    """Channel-wise minimum and maximum of the (rotated) keys of each page, [B, h, P, d] in fp32.

    Pages that a sample does not have get +inf and -inf.
    """
    batch, heads, _, width = key_BhNd.shape
    slot = page_BN.masked_fill(page_BN < 0, num_pages)[:, None, :, None].expand_as(key_BhNd)
    empty = key_BhNd.new_full((batch, heads, num_pages + 1, width), torch.inf, dtype=torch.float32)
    low = empty.scatter_reduce(2, slot, key_BhNd.float(), "amin")
    high = (-empty).scatter_reduce(2, slot, key_BhNd.float(), "amax")
    return low[:, :, :num_pages], high[:, :, :num_pages]


def page_scores(query_BHQd: Tensor, asks_BQ: Tensor, low_BhPd: Tensor, high_BhPd: Tensor) -> Tensor:
    """Mean over query rows and heads of Quest's upper bound sum_d max(q_d * low_d, q_d * high_d), [B, P] in fp32.

    The bound is linear in the positive and the negative part of q, so rows and the query heads of a group are averaged
    before they meet a page. Unscaled, as released. Pages that a sample does not have score NaN or infinity; the choice
    masks them.

    Args:
        query_BHQd: rotated queries; several query heads share a key-value head (GQA).
        asks_BQ: rows that count, bool; a sample without any scores 0 for every page.
        low_BhPd: from ``page_bounds``.
        high_BhPd: from ``page_bounds``.
    """
    kv_heads = low_BhPd.shape[1]
    weight_BQ = asks_BQ.float() / asks_BQ.sum(-1, keepdim=True).clamp(min=1)
    query = query_BHQd.float().reshape(len(query_BHQd), kv_heads, -1, *query_BHQd.shape[2:])
    with torch.autocast(query.device.type, enabled=False):  # training must choose the pages that inference chooses
        positive_Bhd = torch.einsum("bhgqd,bq->bhd", query.clamp(min=0), weight_BQ) / query.shape[2]
        negative_Bhd = torch.einsum("bhgqd,bq->bhd", query.clamp(max=0), weight_BQ) / query.shape[2]
        return page_bound(positive_Bhd, negative_Bhd, low_BhPd, high_BhPd).mean(1)


def keep_pages(scores_BP: Tensor, page_BN: Tensor, count_B: Tensor, protected_B: Tensor) -> Tensor:
    """Context tokens of the kept pages, bool [B, N].

    Args:
        scores_BP: page scores.
        page_BN: from ``page_index``.
        count_B: pages to keep of each sample, the protected ones among them.
        protected_B: last pages of each sample that always stay; at most ``count_B``.
    """
    pages_B1 = page_BN.amax(-1, keepdim=True) + 1
    number_P = torch.arange(scores_BP.shape[1], device=scores_BP.device)
    exists_BP = number_P < pages_B1
    recent_BP = exists_BP & (number_P >= pages_B1 - protected_B[:, None])
    chosen_BP = recent_BP | keep_best(scores_BP, exists_BP & ~recent_BP, count_B - protected_B)
    return (page_BN >= 0) & chosen_BP.gather(1, page_BN.clamp(min=0))


@dataclass(frozen=True, kw_only=True)
class Quest(ContextReducer):
    """Quest.

    Attributes:
        page_size: tokens per page.
        window: last context tokens that always stay, inside the budget.
    """

    name: str = "quest"
    page_size: int = 16
    window: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("reducer page_size", self.page_size, 1, MAX_TOKENS)
        check_range("reducer window", self.window, 0, MAX_TOKENS)

    @property
    def words(self) -> str:
        """Page and window."""
        return f"pages of {self.page_size}, window {self.window}"

    def kept_tokens(self, tokens: int) -> int:
        """Context tokens kept of ``tokens``: whole pages, and the last one, which may be shorter."""
        return (self.kept_pages(tokens) - 1) * self.page_size + self._last_page(tokens)

    def kept_pages(self, tokens: int) -> int:
        """Pages kept of ``tokens`` context tokens, the last one (which may be shorter) always among them.

        Raises:
            ValueError: the context is shorter than a page or than the window, or the budget holds no page, or fewer
                than the window takes.
        """
        page, window, ratio = self.page_size, self.window, self.keep_ratio
        if tokens < max(page, window):
            raise ValueError(
                f"quest: the context has {tokens} tokens, fewer than a page ({page}) or the window ({window}); give a "
                "longer context, or lower page_size and window"
            )
        budget, protected = super().kept_tokens(tokens), self._protected_pages(tokens)
        spare = budget - self._last_page(tokens)
        pages = 1 + (math.ceil(spare / page) if self.round_up else spare // page)
        if pages < protected:
            raise ValueError(
                f"quest: keep_ratio {ratio:g} leaves {budget} of {tokens} context tokens, and pages of {page} with a "
                f"window of {window} need {protected} page(s); raise keep_ratio or lower page_size and window"
            )
        return pages

    def _last_page(self, tokens: int) -> int:
        """Tokens of the last page."""
        return tokens % self.page_size or self.page_size

    def _protected_pages(self, tokens: int) -> int:
        """Last pages that always stay: those that the window reaches, and at least one."""
        reach = max(0, self.window - self._last_page(tokens))
        return 1 + math.ceil(reach / self.page_size)

    @torch.no_grad()
    def keep_context(self, view: ContextView) -> Tensor:
        """Context tokens that stay in this layer, bool [B, N].

        Raises:
            ValueError: see ``kept_pages``; or a sample has context but no query row to choose by.
        """
        tokens = view.context_counts
        if any(count and not asking for count, asking in zip(tokens, view.asks_counts, strict=True)):
            raise ValueError("quest: a sample has context but a query region of zero tokens; nothing can choose pages")
        counts = [self.kept_pages(count) if count else 0 for count in tokens]
        page_size, device = self.page_size, view.context_BN.device
        page_BN = page_index(view.context_BN, page_size)
        pages = max(math.ceil(max(tokens) / page_size), 1)
        low_BhPd, high_BhPd = page_bounds(view.key_BhNd, page_BN, pages)
        scores_BP = page_scores(view.query_BHNd, view.asks_BN, low_BhPd, high_BhPd)
        protected_B = torch.tensor([self._protected_pages(n) if n else 0 for n in tokens], device=device)
        return keep_pages(scores_BP, page_BN, torch.tensor(counts, device=device), protected_B)
