"""Options for the model that runs and the compression of its cache, shared by the commands that generate."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from subtoken_train.evictions import EVICTIONS, WRAPPERS
from subtoken_train.reducers import REDUCERS
from subtoken_train.settings import ARM_SETTINGS, FLAGGED, ArmSettings

if TYPE_CHECKING:
    from subtoken_train.inference.model import SubTokenModel


_EVICTIONS = ("eviction", "eviction_keep", "eviction_every", "eviction_options", "scope")
_CACHES = ("kv_dtype", "dtype", "max_pixels", "key_channels", "key_axes", "merge", "prefill_chunk", "rerotate")


def add_compression_options(parser: ArgumentParser) -> None:
    """Add a plain backbone's reducer and value groups, and for every model the eviction and precision of its cache."""
    add_settings(parser, "reducer", "keep_ratio", "selector", "groups", "layout", *_EVICTIONS, *_CACHES)


def add_eviction_options(parser: ArgumentParser) -> None:
    """Add the eviction, how much it keeps, its settings and its scope."""
    add_settings(parser, *_EVICTIONS)


def add_settings(parser: ArgumentParser, *names: str) -> None:
    """Add options for settings of an arm, as ``ArmSettings`` declares them."""
    listed = {"reducers": ", ".join(REDUCERS), "evictions": ", ".join(EVICTIONS), "wrappers": ", ".join(WRAPPERS)}
    for name in names:
        setting = ARM_SETTINGS[name]
        words = re.sub(r"`(\w+)`", lambda found: spelled_flag(found[1]), setting.words.format(**listed))
        how: dict[str, Any] = {"metavar": setting.metavar, "type": setting.kind}
        if setting.kind is dict:
            how |= {"action": "append", "default": [], "type": str}
            words = f"{words}; repeatable"
        elif setting.kind is bool:
            how = {"action": "store_true", "default": None}
        parser.add_argument(spelled_flag(name), help=words.replace("%", "%%"), **how)
    if "kv_dtype" in names:
        parser.set_defaults(kv_dtype=ArmSettings.kv_dtype)


def flag_name(name: str) -> str:
    """Return a setting's name among parsed options: a method's settings are given by a flag each."""
    return name.replace("options", "option")


def spelled_flag(name: str) -> str:
    """Return a setting as a command line spells it: ``--eviction-keep``."""
    return f"--{flag_name(name).replace('_', '-')}"


def arm_options(args: Namespace) -> dict[str, Any]:
    """Return the options that are given, as ``ArmSpec`` names them; ``adapter`` is left to the command."""
    from subtoken_train.inference.compression import parse_settings

    names = [name for name in FLAGGED if name not in ("adapter", "eviction_options")]
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    if args.eviction_option:
        given["eviction_options"] = parse_settings(args.eviction, args.eviction_option)
    return given


def flagged_model(args: Namespace, adapter: str | None, device: str | None = None) -> SubTokenModel:
    """Load an adapter (its backbone from ``--backbone``, if given) or ``--backbone`` alone, as the options say."""
    from subtoken_train.inference.arm_spec import ArmSpec

    return ArmSpec(adapter=adapter, **arm_options(args), written="flag").load(device)
