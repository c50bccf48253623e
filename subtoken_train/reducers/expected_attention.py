"""ExpectedAttention (Devoto et al., 2025, arXiv:2510.00636) as a token reducer: attention that is expected to come.

The scores are those of the eviction ``expected_attention`` (``evictions/expected_attention.py``: queries are taken to
be normal, with the statistics of the context's own, turned by the mean rotation of the positions after the context),
over the context alone; ``scored_context.py`` says what becomes of heads. What it does not do: it never looks at the
question's queries, and every layer keeps as many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from subtoken_train.evictions.expected_attention import ExpectedAttention
from subtoken_train.reducers.scored_context import ScoredContext


@dataclass(frozen=True, kw_only=True)
class ExpectedAttentionReducer(ScoredContext):
    """ExpectedAttention.

    Attributes:
        sinks: first tokens that always stay, inside the budget, and count in no statistic.
        future: positions after the context whose mean rotation the queries get.
    """

    name: str = "expected_attention"
    sinks: int = 4
    future: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.scorer  # whose settings are checked where it is made

    @property
    def scorer(self) -> ExpectedAttention:
        """The eviction."""
        return ExpectedAttention(sinks=self.sinks, future=self.future)
