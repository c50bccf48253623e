"""No reduction: every token stays."""

from __future__ import annotations

from subtoken_train.reducers.base import Reducer, ReducerConfig


class NoReducer(Reducer):
    """Keeps everything; the pipeline skips the gather. ``keep_ratio`` must be 1."""

    stage = "none"

    def __init__(self, config: ReducerConfig) -> None:
        super().__init__(config)
        if config.keep_ratio != 1:
            raise ValueError(f"reducer 'none' keeps every token, but keep_ratio={config.keep_ratio}; set it to 1")
