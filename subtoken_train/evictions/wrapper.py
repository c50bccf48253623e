"""Base class of wrappers around evictions: they change how much stays or what counts, and their base scores.

Wrappers stand in each other, ``ada(critical(expected_attention))``. All that is not said otherwise is the base's: what
it reads, its passes, its scores, its counts, what it does at a budget.

Legend: B batch, N cached rows of the prompt, h key-value heads, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from subtoken_train.calibrations import Calibration
from subtoken_train.evictions.base import Eviction
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import TaskPlan, View


@dataclass(frozen=True)
class Wrapper(Eviction):
    """A method around another; its own settings are the fields of its subclass.

    A class has the ``name`` that it is registered by; an object's shows the whole chain, and its ``needs`` are all.

    Attributes:
        base: the method that it is put around.
    """

    heads_differ: ClassVar[bool] = False
    """Heads of a layer keep different numbers of entries."""

    base: Eviction

    def __post_init__(self) -> None:
        base = self.base
        if base.reads:
            raise ValueError(
                f"{base.name} keeps every entry and reads some, so {type(self).name} has nothing to choose"
            )
        if type(base).keep is not Eviction.keep:
            raise ValueError(f"{base.name} says itself what stays, so {type(self).name} cannot be put around it")
        said = {
            "name": f"{type(self).name}({base.name})",
            "needs": type(self).needs | base.needs,
            "needs_image": base.needs_image,
            "needs_question": base.needs_question,
            "merges": base.merges,
            "second_pass_advice": base.second_pass_advice,
            "heads_share": type(self).heads_share or base.heads_share,
            "heads_differ": any(getattr(type(each), "heads_differ", False) for each in (self, *self.inside)),
        }
        for key, value in said.items():
            object.__setattr__(self, key, value)

    @property
    def inside(self) -> tuple[Eviction, ...]:
        """All that it is around; the last one is no wrapper."""
        return (self.base, *self.base.inside) if isinstance(self.base, Wrapper) else (self.base,)

    @property
    def reads_question(self) -> bool:
        return self.base.reads_question

    @property
    def calibrated(self) -> Calibration[Any] | None:
        return self.base.calibrated

    @property
    def absolute(self) -> None:
        return None

    @property
    def online(self) -> None:
        return None

    @property
    def may_empty(self) -> bool:
        return self.base.may_empty

    @property
    def across_layers(self) -> bool:
        return self.base.across_layers

    @property
    def observing_rows(self) -> int | None:
        return self.base.observing_rows

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        self.base.check_shape(num_layers, num_kv_heads, head_dim)

    def score(self, view: View) -> Scores:
        return self.base.score(view)

    def second_pass(self, regions_BN: Tensor) -> Tensor:
        return self.base.second_pass(regions_BN)

    def tasks(self, regions_BN: Tensor) -> list[TaskPlan]:
        return self.base.tasks(regions_BN)

    def score_task(self, view: View) -> Tensor:
        return self.base.score_task(view)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        return self.base.counts(scores, candidates)

    def at_budget(self, scores: Scores, competes_BN: Tensor, count_Bh: Tensor) -> Scores:
        return self.base.at_budget(scores, competes_BN, count_Bh)
