"""Compression settings as they are written on a command line: ``0.1``, ``256tokens``, ``20MB``, ``window=32``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from subtoken_train.errors import check_word, unknown_name
from subtoken_train.evictions import setting_defaults
from subtoken_train.inference.compression import KeepUnit

BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9}
SWITCHES = {"true": True, "false": False}


def parse_keep(text: str) -> tuple[float, KeepUnit]:
    """What stays, and its unit.

    A bare number is a fraction; others name ``tokens``, ``B``, ``kB``, ``MB`` or ``GB``, in any case.

    Raises:
        ValueError: no number, or another unit. Whether the number is allowed, ``Compression`` says.
    """
    found = re.fullmatch(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or not math.isfinite(float(found[1]) * max(BYTES.values())):
        raise ValueError(f"{text!r} is no budget; write a fraction (0.1), tokens (256tokens) or bytes (20MB)")
    number, unit = float(found[1]), found[2].lower()
    if not unit:
        return number, "fraction"
    if unit == "tokens":
        return number, "tokens"
    if unit not in BYTES:
        raise unknown_name("unit of a budget", found[2], ["tokens", "B", "kB", "MB", "GB"])
    return round(number * BYTES[unit]), "bytes"


def parse_settings(method: str | None, settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` settings of an eviction method, read as what the method's own defaults are.

    Unknown keys are left for ``build_eviction`` to refuse, settings of no method for ``ArmSpec``.

    Args:
        method: as it is written, wrappers included.
        settings: ``epsilon=0.01``, or ``expected_attention.epsilon=0.01`` where several methods have it.

    Raises:
        ValueError: no such method, no ``=``, a key twice, or a value that is not of its default's kind.
    """
    if method is None:
        return dict.fromkeys(settings)
    defaults = setting_defaults(method)
    read: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"setting {setting!r} of {method} must be written key=value")
        if key in read:
            raise ValueError(f"setting {key!r} of {method} is given twice")
        read[key] = _like(defaults.get(key), text, f"{method} {key}")
    return read


def _like(default: object, text: str, name: str) -> object:
    """The value as a bool, int, float or several numbers where the default is that, else the text itself."""
    if isinstance(default, bool):
        check_word(f"value of {name}", text, SWITCHES)
        return SWITCHES[text]
    if isinstance(default, tuple):
        return tuple(_like(0.0, each, name) for each in text.split(":"))
    kind = type(default)
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name}={text!r} must be {what}; its default is {default}") from None
