"""No reduction: every token stays."""

from __future__ import annotations

from dataclasses import dataclass

from subtoken_train.reducers.base import Reducer, Stage


@dataclass(frozen=True, kw_only=True)
class NoReducer(Reducer):
    """Keeps everything; the pipeline skips the gather. ``keep_ratio`` must be 1."""

    name: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.acts:
            raise ValueError(f"reducer 'none' keeps every token, but keep_ratio={self.keep_ratio}; set it to 1")

    @property
    def stage(self) -> Stage:
        return "none"
