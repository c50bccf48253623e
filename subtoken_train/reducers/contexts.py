"""Reducers of a text's context: Quest, and those that an eviction's scores drive.

Legend: B batch, N positions, H query heads, h key-value heads, Q query rows, d head width, P pages.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from subtoken_train.calibrations import Calibration
from subtoken_train.errors import refuse
from subtoken_train.evictions import EVICTIONS
from subtoken_train.evictions.base import Eviction, check_fitting, keep_best_entries
from subtoken_train.kernels.storage import page_bound
from subtoken_train.reducers.base import ContextReducer
from subtoken_train.types import Region
from subtoken_train.view.method import setting
from subtoken_train.view.view import Need, View


def page_index(context_BN: Tensor, page_size: int) -> Tensor:
    """Number each context token's page, [B, N] int64: ``page_size`` consecutive context tokens each; -1 elsewhere."""
    return torch.where(context_BN, (context_BN.long().cumsum(-1) - 1) // page_size, -1)


def page_bounds(key_BhNd: Tensor, page_BN: Tensor, num_pages: int) -> tuple[Tensor, Tensor]:
    """Return the channel-wise extremes of each page's (rotated) keys, [B, h, P, d] in fp32; of no keys +-inf."""
    batch, heads, _, width = key_BhNd.shape
    slot = page_BN.masked_fill(page_BN < 0, num_pages)[:, None, :, None].expand_as(key_BhNd)
    empty = key_BhNd.new_full((batch, heads, num_pages + 1, width), torch.inf, dtype=torch.float32)
    low = empty.scatter_reduce(2, slot, key_BhNd.float(), "amin")
    return low[:, :, :num_pages], (-empty).scatter_reduce(2, slot, key_BhNd.float(), "amax")[:, :, :num_pages]


def page_scores(query_BHQd: Tensor, asks_BQ: Tensor, low_BhPd: Tensor, high_BhPd: Tensor) -> Tensor:
    """Average Quest's upper bound sum_d max(q_d * low_d, q_d * high_d) over query rows and heads, [B, P] in fp32.

    The bound is linear in the positive and the negative part of q, so rows (those of ``asks_BQ``) and the query heads
    of a group are averaged before they meet a page. Pages that a sample does not have score NaN or infinity.
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
    """Quest (Tang et al., 2024) as the sub-token paper uses it: one-shot, physical eviction of context pages.

    In every layer the same number of tokens stays; which ones, each layer decides for all its heads together: pages by
    the mean, over query rows and heads, of Quest's upper bound on the attention logit. Original Quest keeps all pages
    and chooses anew at every step (the eviction ``quest_steps``); the paper's peak-memory figures fit the reading taken
    here. The budget is met to the token: of the last page that is taken, the latest tokens stay.

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

    def protected_tokens(self, kept_B: Tensor) -> Tensor:
        """Return how many last of the kept tokens stay, int64 [B]: the window, or half of ``kept_B``, rounded down."""
        return (kept_B // 2).clamp(max=self.window)

    @torch.no_grad()
    def keep_context(self, view: View) -> Tensor:
        tokens, context_BN, asks_BN = view.scope_counts, view.in_scope_BN, view.asks_BN
        if any(count and not asking for count, asking in zip(tokens, view.asks_counts, strict=True)):
            raise ValueError("quest: a sample has context but a query region of zero tokens; nothing can choose pages")
        counts = [self.kept_tokens(count) if count else 0 for count in tokens]
        page_BN = page_index(context_BN, self.page_size)
        low_BhPd, high_BhPd = page_bounds(view.key_BhNd, page_BN, max(math.ceil(max(tokens) / self.page_size), 1))
        scores_BP = page_scores(view.query_BHNd, asks_BN, low_BhPd, high_BhPd)
        count_B = torch.cat([context_BN.new_full((1,), each, dtype=torch.long) for each in counts])
        return keep_by_page(scores_BP, context_BN, self.page_size, count_B, self.protected_tokens(count_B))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredContext(ContextReducer):
    """Context reducers that an eviction's scores drive: blind to the question, in training and at inference.

    Any eviction whose scores of a layer can be had from a text's context is one by its own name, with its own settings.
    The budget is the reducer's: as many tokens in every layer, and one set for all heads, by the mean of a token's
    scores over the heads, since value groups are routed per token. A method that reads a second pass (KVzip) has the
    context run twice before the pass that counts, without gradient. Scores never see routed values.
    """

    reads_question: ClassVar[bool] = False
    settings: ClassVar[Mapping[str, str]] = {}  # the eviction's name of each setting

    def __post_init__(self) -> None:
        super().__post_init__()
        method = self.scorer
        does_not_serve = (
            (method.reads, "evicts nothing and chooses anew at every step of decoding, of which training has none"),
            (method.needs_image, "reads the attention between text and image, and a context reducer is for texts"),
            (method.reads_question, "reads the question's rows, which training predicts"),
            ("inputs" in method.needs, "reads what a layer projects, which a context reducer is not shown"),
            (method.across_layers, "divides its budget between layers or heads, and here all keep as many tokens"),
            (method.name == "triattention", "foretells what is read after the prompt, which a reducer does not know"),
            (method.merges != "none", "merges what it evicts into what stays, and a training pass leaves it out"),
        )
        instead = "evict with it after training, or use kvzip, snapkv or compactor"
        own = f"eviction {method.name!r} cannot be a token reducer"
        refuse(*((found, f"{own}: it {why}; {instead}") for found, why in does_not_serve))

    @cached_property
    def scorer(self) -> Eviction:
        """The eviction whose scores decide, with its settings."""
        method = EVICTIONS.find(self.name)
        return method(**{theirs: getattr(self, own) for own, theirs in self.settings.items()}, **method.evenly)

    @property
    def calibrated(self) -> Calibration[Any] | None:
        return self.scorer.calibrated

    @torch.no_grad()
    def keep_context(self, view: View) -> Tensor:
        context_BN = view.in_scope_BN
        counts = [self.kept_tokens(count) if count else 0 for count in view.scope_counts]
        count_B = torch.cat([context_BN.new_full((1,), each, dtype=torch.long) for each in counts])
        with torch.autocast(context_BN.device.type, enabled=False):  # training must choose what inference chooses
            scorer, before_BN = self.scorer, view.before_BN
            last_B1 = view.position.masked_fill(before_BN == int(Region.PADDING), -1).amax(-1, keepdim=True)
            seen = view.replaced(  # as an eviction sees the layer before the question is there
                regions_BN=before_BN,
                next_position=last_B1 + 1,
                needs=scorer.needs,
                attended_BN=(view.regions_BN == int(Region.CONTEXT)) | (before_BN == int(Region.SYSTEM)),
                budget=lambda: count_B,
            )
            scores = scorer.score(seen)
            if view.again is not None:
                about_BN, again_BhN = view.again
                scores.scores_BhN = torch.where(about_BN[:, None], again_BhN, scores.scores_BhN)
            scores = scorer.at_budget(scores, context_BN, count_B)
            check_fitting(scorer, [scores])
            mean_B1N = scores.scores_BhN.mean(1, keepdim=True)
        view.faults.append(mean_B1N.isnan().any())
        known = 0, min(counts), max(counts)
        return keep_best_entries(mean_B1N, context_BN, scores.protected_BN, count_B, 0, known)[:, 0]

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self.name, dataclasses.asdict(self))


_RECORDED = {
    "compactor": {"sinks": "sinks", "last": "last", "chunk": "chunk", "sketch_seed": "seed"},
    "expected_attention": {"sinks": "sinks", "future": "future"},
}
"""Settings of two that adapters and saved caches of earlier versions record, and the evictions' names of them."""


@cache
def context_reducer(method: type[Eviction]) -> type[ScoredContext]:
    """Return the context reducer of an eviction's scores; whether its settings can serve, an object of it says."""
    hints, fields = get_type_hints(method), {each.name: each for each in dataclasses.fields(method)}  # type: ignore[arg-type]
    settings = _RECORDED.get(method.name) or {name: name for name in fields if name not in method.evenly}
    own: list[Any] = [("name", str, method.name)]
    own += [(name, hints[each], dataclasses.field(default=fields[each].default)) for name, each in settings.items()]
    space = {"settings": settings, "needs": method.needs, "__doc__": method.__doc__, "__module__": method.__module__}
    return dataclasses.make_dataclass(
        f"{method.__name__}Context", own, bases=(ScoredContext,), namespace=space, frozen=True, kw_only=True
    )


def _remade(name: str, settings: dict[str, Any]) -> ScoredContext:
    return context_reducer(EVICTIONS.find(name))(**settings)
