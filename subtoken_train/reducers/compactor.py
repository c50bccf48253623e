"""Compactor (Chari & Van Durme, 2025, arXiv:2507.08143) as a token reducer: keys that stand out, chunked attention.

The scores are those of the eviction ``compactor`` (``evictions/compactor.py``: leverage of the keys from a Gaussian
sketch, and attention inside chunks), over the context alone; ``scored_context.py`` says what becomes of heads. The
leverage part counts with the removed share of the context. The sketch is drawn from a seed, the same for every sample
and pass, so that training and inference choose alike. What it does not do: no budget per prompt, no look at the
question, and every layer keeps as many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from subtoken_train.errors import check_range
from subtoken_train.evictions.compactor import Compactor
from subtoken_train.reducers.scored_context import ScoredContext

SEEDS = 1 << 32


@dataclass(frozen=True, kw_only=True)
class CompactorReducer(ScoredContext):
    """Compactor.

    Attributes:
        sinks: first tokens that always stay, inside the budget.
        last: last tokens of the context likewise.
        chunk: tokens that attend to each other.
        sketch_seed: of the Gaussian sketch.
    """

    name: str = "compactor"
    sinks: int = 8
    last: int = 4
    chunk: int = 256
    sketch_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("reducer sketch_seed", self.sketch_seed, 0, SEEDS)
        assert self.scorer  # whose settings are checked where it is made

    @property
    def scorer(self) -> Compactor:
        """The eviction."""
        return Compactor(sinks=self.sinks, last=self.last, chunk=self.chunk, seed=self.sketch_seed)
