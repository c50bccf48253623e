"""KV eviction methods, one file each; a new one is its file and a line in ``EVICTIONS``."""

from __future__ import annotations

import dataclasses
from typing import Any

from subtoken_train.errors import unknown_name
from subtoken_train.evictions.aircache import AirCache
from subtoken_train.evictions.base import (
    Candidates,
    Eviction,
    LayerScores,
    LayerView,
    Need,
    Scope,
    TaskView,
    keep_best_entries,
)
from subtoken_train.evictions.h2o import H2O
from subtoken_train.evictions.knorm import KNorm
from subtoken_train.evictions.kvcompose import KVCompose
from subtoken_train.evictions.pyramidkv import PyramidKV
from subtoken_train.evictions.random import RandomEviction
from subtoken_train.evictions.snapkv import SnapKV
from subtoken_train.evictions.streaming_llm import StreamingLLM
from subtoken_train.evictions.tgv_kv import TGVKV
from subtoken_train.evictions.vl_cache import VLCache

EVICTIONS: dict[str, type[Eviction]] = {
    "streaming_llm": StreamingLLM,
    "h2o": H2O,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "knorm": KNorm,
    "random": RandomEviction,
    "aircache": AirCache,
    "kvcompose": KVCompose,
    "tgv_kv": TGVKV,
    "vl_cache": VLCache,
}


def build_eviction(name: str, **options: Any) -> Eviction:
    """An eviction method by its name, with some of its settings changed.

    Raises:
        ValueError: no such method or setting, or a setting that the method refuses.
    """
    if name not in EVICTIONS:
        raise unknown_name("eviction method", name, EVICTIONS)
    method = EVICTIONS[name]
    settings = [field.name for field in dataclasses.fields(method)]  # type: ignore[arg-type]
    for option in options:
        if option not in settings:
            raise unknown_name(f"setting of {name}", option, settings)
    return method(**options)


__all__ = [
    "EVICTIONS",
    "Candidates",
    "Eviction",
    "LayerScores",
    "LayerView",
    "Need",
    "Scope",
    "TaskView",
    "build_eviction",
    "keep_best_entries",
]
