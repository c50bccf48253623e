"""Quest (Tang et al., 2024) as the sub-token paper uses it: one-shot, physical eviction of whole context pages.

In every layer the same number of pages stays; which ones, each layer decides for itself, for all its heads together: by
the mean, over query rows and heads, of Quest's upper bound on the attention logit. The pages of the last ``window``
context tokens always stay, inside the budget. Original Quest keeps all pages in memory and chooses anew at every step
and head; the paper's peak-memory figures fit the reading taken here (512 and 256 of 2,048 tokens in all layers).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.errors import MAX_TOKENS, check_range
from subtoken_train.functional.pages import keep_pages, page_bounds, page_index, page_scores
from subtoken_train.reducers.base import ContextReducer, ContextView


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
