"""Settings of an arm, each declared once: name, type, default, and the words that explain it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

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

    @property
    def kind_words(self) -> str:
        """Its type in words: ``a whole number of tokens``."""
        return f"{KINDS[self.kind]} of {self.unit}" if self.unit else KINDS[self.kind]


Words = str | None
"""A text that may be left out."""


@dataclass(frozen=True)
class ArmSettings:
    """Settings of which model answers and how its prompts are compressed."""

    adapter: Annotated[Words, Setting("folder or Hub id of an adapter", "DIR|ID")] = None
    backbone: Annotated[Words, Setting("a backbone alone; with `adapter`: where its backbone is", "PATH")] = None
    name: Annotated[
        Words,
        Setting("name of its folder and rows (default: made of the other settings)", flagged=False, harness=False),
    ] = None
    reducer: Annotated[
        Words,
        Setting(
            "token reducer for a backbone alone: {reducers}, or for text an eviction's name; an adapter has its own",
            "NAME",
        ),
    ] = None
    keep_ratio: Annotated[float | None, Setting("share of the tokens that `reducer` keeps", "R")] = None
    reducer_options: Annotated[
        Mapping[str, Any], Setting("further settings of `reducer`", flagged=False, harness=False)
    ] = field(default_factory=dict)
    selector: Annotated[
        Words,
        Setting(
            "untrained choice of value groups: value_norm, output_norm, random, static or leading; for a backbone "
            "alone `groups` says how many, for an adapter it replaces the routers (none: whole values)",
            "NAME",
            harness=False,
        ),
    ] = None
    groups: Annotated[
        Words,
        Setting(
            "value groups for a backbone alone: S, and how many stay, chosen by `selector` (default: value_norm)",
            "S,K",
            harness=False,
        ),
    ] = None
    layout: Annotated[
        Words, Setting("layout of `groups`: contiguous (the default) or per_head", "NAME", harness=False)
    ] = None
    eviction: Annotated[
        Words,
        Setting(
            "KV eviction after the prompt: {evictions}; or {wrappers} around one, 'ada(snapkv)' (default: none)", "NAME"
        ),
    ] = None
    eviction_keep: Annotated[
        str | float | Mapping[str, Any] | None,
        Setting(
            "what the eviction keeps: 0.1 of the entries, 256tokens per layer, 20MB, or what scores no less than "
            "threshold:-4 (threshold:-4:128 with the window, threshold:FILE of calibrate)",
            "BUDGET",
        ),
    ] = None
    eviction_every: Annotated[
        int | None, Setting("evict again each time this many tokens have been generated", "TOKENS", "tokens")
    ] = None
    eviction_options: Annotated[Mapping[str, Any], Setting("settings of the eviction method", "KEY=VALUE")] = field(
        default_factory=dict
    )
    scope: Annotated[
        Words,
        Setting(
            "what the eviction chooses among: context (the default, also written visual) or all (text too)",
            "context|all",
        ),
    ] = None
    kv_dtype: Annotated[
        str,
        Setting(
            "precision of the stored prompt (default: model)", "model|int8|int4|int4_rotated|int8_channel|kivi4|kivi2"
        ),
    ] = "model"
    key_channels: Annotated[
        float,
        Setting("share of the key channels in scope that stay, with or without an eviction (default: 1)", "SHARE"),
    ] = 1.0
    key_axes: Annotated[
        str,
        Setting(
            "axes along which `key_channels` cuts: own (the model's channels, by default) or pca (keys turned to their "
            "principal axes, as RotateK does)",
            "own|pca",
        ),
    ] = "own"
    merge: Annotated[
        Words,
        Setting(
            "how evicted entries join kept ones: none, average, weighted, pivot or position (default: the method's)",
            "KIND",
        ),
    ] = None
    protocol: Annotated[
        Protocol,
        Setting(
            "query_aware (default), or context_first: the context is compressed before the question is seen", "NAME"
        ),
    ] = "query_aware"
    prefill_chunk: Annotated[
        int | None, Setting("rows of a prompt to run at a time, e.g. 4096 (default: all)", "ROWS", "rows")
    ] = None
    rerotate: Annotated[bool, Setting("rotate the keys that stay to consecutive positions")] = False
    dtype: Annotated[
        Words, Setting("dtype of the frozen weights: float32, bfloat16 or float16 (default: the adapter's)", "NAME")
    ] = None
    max_pixels: Annotated[
        int | None,
        Setting("largest image, for models that keep an image's own size (Qwen-VL, InternVL, SmolVLM)", "N", "pixels"),
    ] = None
    seed: Annotated[
        int | None,
        Setting(
            "seed of the reducer, selector or eviction random, or of the selector static", flagged=False, harness=False
        ),
    ] = None


def settings_of(declared: type) -> dict[str, Setting]:
    """Return the settings that a dataclass declares by ``Annotated``, by name, in order."""
    found: dict[str, Setting] = {}
    for name, hint in get_type_hints(declared, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Setting):
                found[name] = replace(note, kind=_kind(hint.__origin__))
    return found


def _kind(hint: Any) -> type:
    first = get_args(hint)[0] if get_origin(hint) is UnionType else hint
    return dict if get_origin(first) is Mapping else first if first in KINDS else str


ARM_SETTINGS = settings_of(ArmSettings)
FLAGGED = tuple(name for name, each in ARM_SETTINGS.items() if each.flagged)
"""Settings that commands offer as options."""
