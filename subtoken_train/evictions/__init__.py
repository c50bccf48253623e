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


def check_online(method: Eviction | None, every: object, tokens: int | None) -> None:
    """Raise a worded ``ValueError`` unless a method can evict again after ``every`` generated tokens.

    Args:
        method: None is none.
        every: what was written.
        tokens: the budget, where it is a number of tokens.
    """
    if type(every) is not int or every < 1:
        raise ValueError(f"eviction_every={every!r} must be a whole number of at least 1, for instance 128 tokens")
    if method is None:
        raise ValueError(f"eviction_every={every} needs an eviction method, for instance eviction='snapkv'")
    if method.online is None:
        can = [name for name in EVICTIONS if EVICTIONS.find(name)().online is not None]
        raise ValueError(
            f"eviction {method.name!r}, as it is set, cannot evict while tokens are decoded; with their own settings "
            f"these can: {', '.join(can)}. Leave eviction_every out, or take one of them"
        )
    if tokens is not None and every > tokens:
        raise ValueError(
            f"eviction_every={every} is more than the budget, eviction_keep={tokens} tokens; take {tokens} or less"
        )
