"""Compression settings as they are written on a command line: ``0.1``, ``256tokens``, ``20MB``, ``window=32``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from typing import Any

from subtoken_train.errors import check_word, clipped, unknown_name
from subtoken_train.evictions import setting_fields
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
        raise ValueError(
            f"{clipped(repr(text), 60)} is no budget; write a fraction (0.1), tokens (256tokens) or bytes (20MB)"
        )
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
    return read_settings(setting_fields(method), method, settings)


def read_settings(fields: Mapping[str, Field[Any]], name: str, settings: Sequence[str]) -> dict[str, Any]:
    """``key=value`` settings of a dataclass, each read as what its field is; keys of no field stay texts.

    Args:
        fields: by key.
        name: of what is set, for messages.
        settings: as they are written.

    Raises:
        ValueError: no ``=``, a key twice, or a value that is not of its field's kind.
    """
    read: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"setting {setting!r} of {name} must be written key=value")
        if key in read:
            raise ValueError(f"setting {key!r} of {name} is given twice")
        kind, default = (str, None) if key not in fields else (_kind(fields[key]), fields[key].default)
        read[key] = _as(kind, text, f"{name} {key}", default)
    return read


def _kind(field: Field[Any]) -> Callable[[str], object]:
    """Of a setting's values: that of its default, or (where that is None) what its annotation names, else text."""
    if str(field.type) == "int | float":
        return _whole_or_share
    if isinstance(field.default, bool | int | float | tuple):
        return type(field.default)
    named = re.search(r"\b(int|float)\b", str(field.type))
    return str if named is None else {"int": int, "float": float}[named[0]]


def _whole_or_share(text: str) -> float:
    """Read a whole number as an int, any other as a float."""
    return int(text) if re.fullmatch(r"[-+]?\d+", text.strip()) else float(text)


def _as(kind: Callable[[str], object], text: str, name: str, default: object) -> object:
    """A text as a bool, int, float or several numbers, or as it is."""
    if kind is bool:
        check_word(f"value of {name}", text, SWITCHES)
        return SWITCHES[text]
    if kind is str:
        return text
    try:
        return tuple(map(float, text.split(":"))) if kind is tuple else kind(text)
    except ValueError:
        if kind is tuple:
            raise ValueError(f"{name}={text!r} must be numbers between colons, for instance 4:3:2:1") from None
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name}={text!r} must be {what}; its default is {default}") from None
