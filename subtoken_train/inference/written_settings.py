"""Compression settings as they are written on a command line: ``0.1``, ``256tokens``, ``20MB``, ``window=32``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from subtoken_train.errors import check_word, unknown_name
from subtoken_train.evictions import EVICTIONS
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

    Unknown methods and keys are left for ``build_eviction`` to refuse, settings of no method for ``ArmSpec``.

    Raises:
        ValueError: no ``=``, a key twice, or a value that is not of its default's kind.
    """
    if method is None:
        return dict.fromkeys(settings)
    return read_settings(EVICTIONS.get(method), method, settings)


def read_settings(kind: type | None, name: str, settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` settings of a dataclass, each read as its field's type; keys of no field stay texts.

    Args:
        kind: the dataclass; None: all stay texts.
        name: of what is set, for messages.
        settings: as they are written.

    Raises:
        ValueError: no ``=``, a key twice, or a value that is not of its field's type.
    """
    hints = {} if kind is None else get_type_hints(kind)
    read: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"setting {setting!r} of {name} must be written key=value")
        if key in read:
            raise ValueError(f"setting {key!r} of {name} is given twice")
        read[key] = _like(hints.get(key, str), text, f"{name} {key}", getattr(kind, key, None))
    return read


def _like(hint: Any, text: str, name: str, default: object) -> object:
    """The value as a bool, int or float where the field is one (or none), else the text itself."""
    kinds = {bool, int, float} & {hint, *get_args(hint)}
    if bool in kinds:
        check_word(f"value of {name}", text, SWITCHES)
        return SWITCHES[text]
    if not kinds:
        return text
    kind = int if int in kinds else float
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name}={text!r} must be {what}; its default is {default}") from None
