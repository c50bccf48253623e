"""Context reducers that an eviction's scores drive: blind to the question, in training and at inference.

Any eviction whose scores of a layer can be had from a text's context is one by its own name, with its own settings. A
layer's ``View`` holds the rows before the question, as under the protocol ``context_first``. The budget is the
reducer's: as many tokens in every layer, and one set for all heads, by the mean of a token's scores over the heads,
since value groups are routed per token. A method that reads a second pass (KVzip) has the context run twice before the
pass that counts, without gradient. Scores never see routed values, and no set is revised later.

Legend: B batch, N positions, h key-value heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor

from subtoken_train.calibrations import Calibration
from subtoken_train.evictions import EVICTIONS
from subtoken_train.evictions.base import Eviction, keep_best_entries
from subtoken_train.reducers.base import ContextReducer
from subtoken_train.types import Region
from subtoken_train.view.view import View


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredContext(ContextReducer):
    """Keeps the context tokens that an eviction's scores put first, in every layer a set of its own.

    ``context_reducer`` makes a class for each eviction, whose fields are the eviction's settings.
    """

    reads_question: ClassVar[bool] = False
    settings: ClassVar[Mapping[str, str]] = {}
    """The eviction's name of each setting."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_serves(self.scorer)

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
        """``kept_tokens`` of each sample; of a budget too small for what the scorer protects, its latest stay."""
        context_BN = view.in_scope_BN
        counts = [self.kept_tokens(count) if count else 0 for count in view.scope_counts]
        count_B = torch.tensor(counts, device=context_BN.device)
        with torch.autocast(context_BN.device.type, enabled=False):  # training must choose what inference chooses
            scorer, seen = self.scorer, self._before_the_question(view, context_BN, count_B)
            scores = scorer.score(seen)
            if view.again is not None:
                about_BN, again_BhN = view.again
                scores.scores_BhN = torch.where(about_BN[:, None], again_BhN, scores.scores_BhN)
            scores = scorer.at_budget(scores, context_BN, count_B)
            mean_B1N = scores.scores_BhN.mean(1, keepdim=True)
        return keep_best_entries(mean_B1N, context_BN, scores.protected_BN, count_B, least=0)[:, 0]

    def _before_the_question(self, view: View, context_BN: Tensor, count_B: Tensor) -> View:
        """The layer as an eviction sees it before the question is there."""
        system_BN = view.regions_BN == Region.SYSTEM
        entries_BN = context_BN | system_BN
        last_B1 = view.position.masked_fill(~entries_BN, -1).amax(-1, keepdim=True)
        regions_BN = view.regions_BN.masked_fill(~entries_BN, Region.PADDING)
        return view.replaced(
            regions_BN=regions_BN,
            next_position=last_B1 + 1,
            needs=self.scorer.needs,
            attended_BN=(view.regions_BN == Region.CONTEXT) | system_BN,  # more than a window leaves
            budget=lambda: count_B,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Name the eviction, by which the class is made again."""
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


def _check_serves(method: Eviction) -> None:
    why = None
    if method.reads:
        why = "evicts nothing and chooses anew at every step of decoding, of which training has none"
    elif method.needs_image:
        why = "reads the attention between text and image, and a context reducer is for texts"
    elif method.reads_question:
        why = "reads the question's rows, which training predicts"
    elif "inputs" in method.needs:
        why = "reads what a layer projects, which a context reducer is not shown"
    elif method.across_layers:
        why = "divides its budget between layers or heads, and a context reducer keeps as many tokens in each"
    elif method.merges != "none":
        why = "merges what it evicts into what stays, and a training pass leaves it out"
    if why is not None:
        raise ValueError(
            f"eviction {method.name!r} is no context reducer: it {why}; evict with it after training, or use kvzip, "
            "snapkv, compactor or another one that scores a layer's context"
        )
