"""KV eviction methods, one file each; a new one is its file and a line in ``EVICTIONS``."""

from __future__ import annotations

import dataclasses
from typing import Any

from subtoken_train.errors import unknown_name
from subtoken_train.evictions.aircache import AirCache
from subtoken_train.evictions.base import Candidates, Eviction, LayerScores, LayerView, Need, Scope, keep_best_entries
from subtoken_train.evictions.kvcompose import KVCompose
from subtoken_train.evictions.tgv_kv import TGVKV
from subtoken_train.evictions.vl_cache import VLCache

EVICTIONS: dict[str, type[Eviction]] = {
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
    "build_eviction",
    "keep_best_entries",
]
