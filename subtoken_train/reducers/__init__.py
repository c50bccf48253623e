"""Token reducers, one file each; a new one is its file and a line in ``REDUCERS``."""

from __future__ import annotations

from subtoken_train.errors import unknown_name
from subtoken_train.reducers.base import (
    ContextReducer,
    ContextView,
    PositionPolicy,
    RankingReducer,
    Reducer,
    ReducerConfig,
    ReducerView,
    TowerReducer,
)
from subtoken_train.reducers.fastv import FastV
from subtoken_train.reducers.none import NoReducer
from subtoken_train.reducers.quest import Quest
from subtoken_train.reducers.random import RandomReducer
from subtoken_train.reducers.visionzip import VisionZip

REDUCERS: dict[str, type[Reducer]] = {
    "none": NoReducer,
    "random": RandomReducer,
    "fastv": FastV,
    "visionzip": VisionZip,
    "quest": Quest,
}


def build_reducer(config: ReducerConfig, num_layers: int) -> Reducer:
    """A reducer by its name, checked against the model's depth; wrong settings are a worded ``ValueError``."""
    if config.name not in REDUCERS:
        raise unknown_name("reducer", config.name, REDUCERS)
    reducer = REDUCERS[config.name](config)
    if reducer.scout_layers > num_layers or reducer.cut_layer >= num_layers:
        raise ValueError(f"FastV layer={config.layer} does not fit a model of {num_layers} layers ({reducer.stage})")
    return reducer


__all__ = [
    "REDUCERS",
    "ContextReducer",
    "ContextView",
    "PositionPolicy",
    "RankingReducer",
    "Reducer",
    "ReducerConfig",
    "ReducerView",
    "TowerReducer",
    "build_reducer",
]
