"""KV eviction methods; a new one is a class and a line in ``EVICTIONS`` or ``WRAPPERS``, which name each one's file.

They score; ``base.py`` (``Eviction.keep``) turns scores into what stays, ``budgets.py`` divides a budget.
"""

import dataclasses
import math
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args

from subtoken_train.errors import check_range, check_word, clipped, refuse, unknown_name
from subtoken_train.registry import Registry
from subtoken_train.typed import checked
from subtoken_train.view.method import hint_of

if TYPE_CHECKING:
    from subtoken_train.evictions.base import Eviction, Wrapper


EVICTIONS: "Registry[Eviction]" = Registry(
    "eviction method",
    group="subtoken_train.evictions",
    package=__name__,
    base="base:Eviction",
    named=True,
    builtin={
        "streaming_llm": "keys:StreamingLLM",
        "h2o": "h2o:H2O",
        "snapkv": "snapkv:SnapKV",
        "pyramidkv": "snapkv:PyramidKV",
        "cake": "snapkv:CAKE",
        "headkv": "snapkv:HeadKV",
        "sparsemm": "snapkv:SparseMM",
        "knorm": "keys:KNorm",
        "random": "keys:RandomEviction",
        "aircache": "vision:AirCache",
        "kvcompose": "kvzip:KVCompose",
        "kvzip": "kvzip:KVzip",
        "kvgrad": "kvzip:KVgrad",
        "kvzap": "kvzip:KVzap",
        "quest_steps": "queries:QuestSteps",
        "tgv_kv": "vision:TGVKV",
        "vl_cache": "vision:VLCache",
        "look_m": "h2o:LookM",
        "meda": "h2o:MEDA",
        "expected_attention": "queries:ExpectedAttention",
        "capkv": "queries:CapKV",
        "compactor": "keys:Compactor",
        "keydiff": "keys:KeyDiff",
        "tova": "queries:TOVA",
        "lagkv": "keys:LagKV",
        "elastic": "h2o:Elastic",
        "prefixkv": "h2o:PrefixKV",
        "duo_attention": "duo_attention:DuoAttention",
        "q_filter": "queries:QFilter",
        "simlayerkv": "duo_attention:SimLayerKV",
        "cur": "keys:CUR",
        "finch": "queries:Finch",
        "triattention": "queries:TriAttention",
        "rkv": "snapkv:RKV",
    },
)

WRAPPERS: "Registry[Wrapper]" = Registry(
    "eviction wrapper",
    group="subtoken_train.eviction_wrappers",
    package=__name__,
    base="base:Wrapper",
    named=True,
    builtin={
        "ada": "wrappers:Ada",
        "critical": "wrappers:CriticalKV",
        "chunk": "wrappers:ChunkKV",
        "lkv": "wrappers:LearnedBudgets",
        "per_layer": "wrappers:PerLayer",
        "pooled": "wrappers:Pooled",
    },
)
"""Wrappers for methods and for each other."""

LARGEST = 2**31 - 1  # whole number among settings; no prompt has as many entries


def build_eviction(notation: str, **options: Any) -> "Eviction":
    """Build an eviction, or wrappers around one (``ada(critical(expected_attention))``), with some settings changed."""
    names = known_names(notation)
    given: dict[str, dict[str, Any]] = {name: {} for name in names}
    for option, value in options.items():
        owner, setting = _owner(notation, names, option)
        if setting in given[owner]:
            raise ValueError(f"setting {setting!r} of {owner} is given twice; {owner}.{setting} is the same")
        hint, place = hint_of(_kind(owner), setting), f"{owner} {setting}"
        if {hint, *(get_args(hint) if isinstance(hint, UnionType) else ())} & {bool, int, float}:
            checked(hint, value, place)  # the method checks texts and tables itself
            check_range(place, value, -LARGEST, math.inf if type(value) is float else LARGEST)
        given[owner][setting] = value
    built = EVICTIONS[names[-1]](**given[names[-1]])
    for name in reversed(names[:-1]):
        built = WRAPPERS[name](built, **given[name])
    return built


def setting_fields(notation: str) -> dict[str, dataclasses.Field[Any]]:
    """Return a notation's settings by the names that ``build_eviction`` takes, with a method's name or without."""
    names = known_names(notation)
    found = {}
    for name in names:
        for key, field in _fields(name).items():
            found[f"{name}.{key}"] = field
            if sum(key in _fields(other) for other in names) == 1:
                found[key] = field
    return found


def known_names(notation: str) -> tuple[str, ...]:
    """Return the names of a notation, as ``notation_names`` does; unknown ones are refused, and none is imported."""
    *around, inner = names = notation_names(notation)
    for name in around:
        check_word("eviction wrapper", name, WRAPPERS)
    refuse((inner in WRAPPERS, f"eviction {notation!r}: {inner} goes around a method; write {inner}(snapkv)"))
    if inner not in EVICTIONS:
        raise unknown_name("eviction method", inner, EVICTIONS if around else [*EVICTIONS, *WRAPPERS])
    return names


def _kind(name: str) -> Any:
    return EVICTIONS[name] if name in EVICTIONS else WRAPPERS[name]


def _fields(name: str) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(_kind(name)) if field.name != "base"}


def _owner(notation: str, names: tuple[str, ...], option: str) -> tuple[str, str]:
    owner, dot, setting = option.partition(".")
    if dot:
        check_word(f"method of {notation}", owner, names)
        check_word(f"setting of {owner}", setting, _fields(owner))
        return owner, setting
    holders = [name for name in names if option in _fields(name)]
    if len(holders) > 1:
        written = " or ".join(f"{name}.{option}" for name in holders)
        raise ValueError(f"several methods of {notation} have the setting {option!r}; write {written}")
    check_word(f"setting of {notation}", option, [key for name in names for key in _fields(name)])
    return holders[0], option


def check_online(method: "Eviction | None", every: object, tokens: int | None) -> None:
    """Raise a worded ``ValueError`` unless a method can evict again after ``every`` of its budget's ``tokens``."""
    if every is None:
        return
    if type(every) is not int or every < 1:
        raise ValueError(f"eviction_every={every!r} must be a whole number of at least 1, for instance 128 tokens")
    if method is not None and method.online is None:
        can = [name for name in EVICTIONS if EVICTIONS.find(name)().online is not None]
        cannot = f"eviction {method.name!r} with these settings cannot evict while tokens are decoded"
        raise ValueError(f"{cannot}; leave eviction_every out, or use one of {', '.join(can)}")
    if tokens is not None and every > tokens:
        raise ValueError(f"eviction_every={every} exceeds eviction_keep={tokens} tokens; use {tokens} or less")


DEEPEST = 8  # methods inside each other; more is a slip of the hand


def notation_names(notation: str) -> tuple[str, ...]:
    """Split a notation into names, the outermost wrapper first, the method last; unknown names pass."""
    names = tuple(notation.rstrip(")").split("(")) if isinstance(notation, str) else ()
    written, once = "(".join(names) + ")" * (len(names) - 1), len(set(names)) == len(names)
    empty = len(names) > 1 and "" in names
    if written != notation or ")" in "".join(names) or empty or not once or len(names) > DEEPEST:
        form = f"write a method, or wrappers around one, each once and at most {DEEPEST} in all: ada(critical(snapkv))"
        raise ValueError(f"eviction {clipped(repr(notation), 60)} cannot be read; {form}")
    return names
