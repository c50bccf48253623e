"""KV eviction methods, one file each; a new one is its file and a line in ``EVICTIONS``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from subtoken_train.errors import check_word
from subtoken_train.registry import Registry

if TYPE_CHECKING:
    from subtoken_train.evictions.base import Eviction

EVICTIONS: Registry[Eviction] = Registry(
    "eviction method",
    group="subtoken_train.evictions",
    package=__name__,
    base="base:Eviction",
    named=True,
    builtin={
        "streaming_llm": "streaming_llm:StreamingLLM",
        "h2o": "h2o:H2O",
        "snapkv": "snapkv:SnapKV",
        "pyramidkv": "pyramidkv:PyramidKV",
        "knorm": "knorm:KNorm",
        "random": "random:RandomEviction",
        "aircache": "aircache:AirCache",
        "kvcompose": "kvcompose:KVCompose",
        "kvzip": "kvzip:KVzip",
        "tgv_kv": "tgv_kv:TGVKV",
        "vl_cache": "vl_cache:VLCache",
        "expected_attention": "expected_attention:ExpectedAttention",
        "compactor": "compactor:Compactor",
        "keydiff": "keydiff:KeyDiff",
        "tova": "tova:TOVA",
        "lagkv": "lagkv:LagKV",
        "elastic": "elastic:Elastic",
        "prefixkv": "prefixkv:PrefixKV",
    },
)


def build_eviction(name: str, **options: Any) -> Eviction:
    """An eviction method by its name, with some of its settings changed.

    Raises:
        ValueError: no such method or setting, or a setting that the method refuses.
    """
    method = EVICTIONS.find(name)
    settings = [field.name for field in dataclasses.fields(method)]  # type: ignore[arg-type]
    for option in options:
        check_word(f"setting of {name}", option, settings)
    return method(**options)
