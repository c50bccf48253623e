"""Settings of an arm, each declared once: name, type, default, and the words that explain it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from subtoken_train.errors import clipped, refuse, unknown_name
from subtoken_train.types import Protocol

KINDS = {str: "text", float: "a number", int: "a whole number", bool: "true or false", dict: "a mapping of settings"}
"""Types of settings in words."""


@dataclass(frozen=True)
class Setting:
    """Type and explanation of one setting.

    Attributes:
        words: a phrase; ``{reducers}``, ``{evictions}`` and ``{wrappers}`` stand for the methods' names, other settings
            in backticks.
        flagged: whether it is an option of the commands that run an arm.
        harness: whether a harness's ``model_args`` may hold it.
        kind: one of ``KINDS``; read off the annotation.
    """

    words: str
    metavar: str = ""
    unit: str = ""
    flagged: bool = True
    harness: bool = True
    kind: type = str


Words = str | None  # a text that may be left out
_SAID = {
    "adapter": "folder or Hub id of an adapter",
    "backbone": "a backbone alone; with `adapter`: where its backbone is",
    "name": "name of its folder and rows (default: made of the other settings)",
    "reducer": "token reducer for a backbone alone: {reducers}, or for text an eviction's name; an adapter has its own",
    "keep_ratio": "share of the tokens that `reducer` keeps",
    "reducer_options": "further settings of `reducer`",
    "selector": "untrained choice of value groups: value_norm, output_norm, random, static or leading; for a backbone "
    "alone `groups` says how many, for an adapter it replaces the routers (none: whole values)",
    "groups": "value groups for a backbone alone: S, and how many stay, chosen by `selector` (default: value_norm)",
    "layout": "layout of `groups`: contiguous (the default) or per_head",
    "byte_share": "share of bytes that an adapter's byte budget spends (default: its own)",
    "eviction": "KV eviction after the prompt: {evictions}; or {wrappers} around one, 'ada(snapkv)' (default: none)",
    "eviction_keep": "what the eviction keeps: 0.1 (a share of the entries), 256tokens (a layer), 20MB or threshold:-4 "
    "(all that score as much; threshold:-4:128 sets the window, threshold:FILE is from calibrate)",
    "eviction_every": "evict again each time this many tokens have been generated",
    "eviction_options": "settings of the eviction method",
    "scope": "what the eviction chooses among: context (the default, also written visual) or all (text too)",
    "kv_dtype": "precision of the stored prompt (default: model)",
    "key_channels": "share of the key channels in scope that stay, with or without an eviction (default: 1)",
    "key_axes": "axes along which `key_channels` cuts: own (the model's channels, by default) or pca (keys turned to "
    "their principal axes, as RotateK does)",
    "merge": "how evicted entries join kept ones: none, average, weighted, pivot or position (default: the method's)",
    "protocol": "query_aware (default), or context_first: the context is compressed before the question is seen",
    "prefill_chunk": "rows of a prompt to run at a time, e.g. 4096 (default: all)",
    "rerotate": "rotate the keys that stay to consecutive positions",
    "dtype": "dtype of the frozen weights: float32, bfloat16 or float16 (default: the adapter's)",
    "max_pixels": "largest image, for models that keep an image's own size (Qwen-VL, InternVL, SmolVLM)",
    "seed": "seed of the reducer, selector or eviction random, or of the selector static",
}
KVDtype = (
    Literal["model", "int8", "int4", "int4_rotated", "fp8", "nvfp4"]
    | Literal["int8_channel", "kivi4", "kivi2", "turboquant4", "turboquant3"]
)
FORMAT_NAMES = tuple(name for names in get_args(KVDtype) for name in get_args(names))
KeepUnit = Literal["fraction", "tokens", "bytes"]
MOST = 2**53
"""Tokens or bytes of a budget: what a float still counts one by one."""
_NO_FLAG: dict[str, Any] = {"flagged": False, "harness": False}


def _of(name: str, metavar: str = "", unit: str = "", **where: Any) -> Setting:
    return Setting(_SAID[name], metavar, unit, **where)


@dataclass(frozen=True)
class ArmSettings:
    """Settings of which model answers and how its prompts are compressed."""

    adapter: Annotated[Words, _of("adapter", "DIR|ID")] = None
    backbone: Annotated[Words, _of("backbone", "PATH")] = None
    name: Annotated[Words, _of("name", **_NO_FLAG)] = None
    reducer: Annotated[Words, _of("reducer", "NAME")] = None
    keep_ratio: Annotated[float | None, _of("keep_ratio", "R")] = None
    reducer_options: Annotated[Mapping[str, Any], _of("reducer_options", **_NO_FLAG)] = field(default_factory=dict)
    selector: Annotated[Words, _of("selector", "NAME", harness=False)] = None
    groups: Annotated[Words, _of("groups", "S,K", harness=False)] = None
    layout: Annotated[Words, _of("layout", "NAME", harness=False)] = None
    byte_share: Annotated[float | None, _of("byte_share", "SHARE")] = None
    eviction: Annotated[Words, _of("eviction", "NAME")] = None
    eviction_keep: Annotated[str | float | Mapping[str, Any] | None, _of("eviction_keep", "BUDGET")] = None
    eviction_every: Annotated[int | None, _of("eviction_every", "TOKENS", "tokens")] = None
    eviction_options: Annotated[Mapping[str, Any], _of("eviction_options", "KEY=VALUE")] = field(default_factory=dict)
    scope: Annotated[Words, _of("scope", "context|all")] = None
    kv_dtype: Annotated[str, _of("kv_dtype", "|".join(FORMAT_NAMES))] = "model"
    key_channels: Annotated[float, _of("key_channels", "SHARE")] = 1.0
    key_axes: Annotated[str, _of("key_axes", "own|pca")] = "own"
    merge: Annotated[Words, _of("merge", "KIND")] = None
    protocol: Annotated[Protocol, _of("protocol", "NAME")] = "query_aware"
    prefill_chunk: Annotated[int | None, _of("prefill_chunk", "ROWS", "rows")] = None
    rerotate: Annotated[bool, _of("rerotate")] = False
    dtype: Annotated[Words, _of("dtype", "NAME")] = None
    max_pixels: Annotated[int | None, _of("max_pixels", "N", "pixels")] = None
    seed: Annotated[int | None, _of("seed", **_NO_FLAG)] = None


def settings_of(declared: type) -> dict[str, Setting]:
    """Return the settings that a dataclass declares by ``Annotated``, by name, in order."""
    found: dict[str, Setting] = {}
    for name, hint in get_type_hints(declared, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Setting):
                first = get_args(hint.__origin__)[0] if get_origin(hint.__origin__) is UnionType else hint.__origin__
                kind = dict if get_origin(first) is Mapping else first if first in KINDS else str
                found[name] = replace(note, kind=kind)
    return found


ARM_SETTINGS = settings_of(ArmSettings)
FLAGGED = tuple(name for name, each in ARM_SETTINGS.items() if each.flagged)  # settings that commands offer as options


BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def parse_keep(text: str) -> tuple[float, KeepUnit]:
    """Return a budget's number and unit: ``tokens``, ``B``, ``kB``, ``MB`` or ``GB``; a bare number is a fraction."""
    found = re.fullmatch(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or not math.isfinite(float(found[1]) * max(BYTES.values())):
        forms = "write a fraction (0.1), tokens (256tokens) or bytes (20MB)"
        raise ValueError(f"{clipped(repr(text), 60)} is not a budget; {forms}")
    number, unit = float(found[1]), found[2].lower()
    if unit in ("", "tokens"):
        return number, "tokens" if unit else "fraction"
    if unit not in BYTES:
        raise unknown_name("unit of a budget", found[2], ["tokens", "B", "kB", "MB", "GB"])
    return round(number * BYTES[unit]), "bytes"


def check_amount(keep: float, unit: KeepUnit) -> None:
    """Refuse what is no budget of an eviction."""
    number, fraction = type(keep) in (int, float), unit == "fraction"
    range_words = f"eviction_keep={keep} must lie in (0, 1]; 0.1 keeps a tenth of the cached entries"
    count_words = f"eviction_keep={keep} {unit} must be a whole number of at least 1, and at most {MOST:,}"
    refuse(
        (not number, f"eviction_keep={keep!r} must be a number; 0.1 keeps a tenth of the cached entries"),
        (number and fraction and not 0 < keep <= 1, range_words),
        (number and not fraction and not (1 <= keep <= MOST and keep == int(keep)), count_words),
    )


def check_written_keep(written: object) -> None:
    """Refuse a text or number that is no budget of an eviction; a threshold is read beside its method."""
    if not isinstance(written, Mapping) and "threshold" not in str(written):
        check_amount(*parse_keep(str(written)))
