"""Build dataclasses from the plain values of a file, with every name and every type checked.

``BackboneConfig(**json.load(file))`` takes a text where a number belongs and fails much later, or never.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from subtoken_train.errors import clipped, first_names, unknown_name

T = TypeVar("T")
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
"""The plain types in words."""
_LEAST, _MOST = -(2**63), 2**63 - 1


def typed(kind: type[T], content: object, place: str) -> T:
    """Build a dataclass from a mapping.

    Args:
        kind: the dataclass. Fields may be int, float, bool, str, None, Any, Literal, list, tuple[X, ...], dict[str, X],
            unions of them, and dataclasses.
        content: what a file holds.
        place: file and key, for messages.
    """
    assert dataclasses.is_dataclass(kind)
    if not isinstance(content, dict):
        raise ValueError(f"{place} is {shown(content)}; it must be a group of keys")
    plan = _plan(kind)
    if unknown := content.keys() - plan.hints.keys():
        raise ValueError(f"{place}: {unknown_name('key', next(n for n in content if n in unknown), plan.hints)}")
    _check_there([name for name in plan.required if name not in content], place)
    made = dict(content)
    for name, value in content.items():
        if type(value) not in plan.exact[name] or not _in_range(value):
            made[name] = checked(plan.hints[name], value, f"{place}: {name}")
    return kind(**made)


def own_settings(kind: type | None, options: Mapping[str, Any], place: str, owner: str) -> Any:
    """Build the settings that a method of ours or of another package declares for itself.

    Args:
        kind: their dataclass; None: it declares none, and None is returned.
        options: what a file says of them.
        place: key of the options, for messages.
        owner: the method, for messages.
    """
    if options and (kind is None or not dataclasses.fields(kind)):
        names = first_names([str(name) for name in options])
        raise ValueError(f"{owner} has no settings of its own, and {place} names {names}: leave it out")
    return None if kind is None else typed(kind, dict(options), place)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Fields of a dataclass: their types, those without a default, and the types that need no second look."""

    hints: dict[str, Any]
    required: tuple[str, ...]
    exact: dict[str, frozenset[type]]


@cache
def _plan(kind: type) -> _Plan:
    fields = [field for field in dataclasses.fields(kind) if field.init]
    every = get_type_hints(kind)
    hints = {field.name: every[field.name] for field in fields}
    required = [
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    return _Plan(hints, tuple(required), {name: frozenset(_scalars(hint)) for name, hint in hints.items()})


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


def _scalars(hint: Any) -> list[type]:
    """List the plain types of a hint, which ``type(value)`` alone tells apart."""
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for each in get_args(hint) for kind in _scalars(each)]
    return [hint] if hint in WORDS else []


def _in_range(value: Any) -> bool:
    if type(value) is int:
        return bool(_LEAST <= value <= _MOST)
    return type(value) is not float or math.isfinite(value)


def checked(hint: Any, value: Any, place: str) -> Any:
    """Return a value as the type of ``hint``: lists become tuples, and whole numbers floats, where it asks for them."""
    origin, inner = _parts(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(inner, value, place)
    if origin is Literal:
        return _named(inner, value, place)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return value if isinstance(value, hint) else typed(hint, value, place)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value, place)
    if type(value) is not ({list: list, tuple: list, dict: dict}.get(origin) if origin else hint):
        raise ValueError(f"{place} is {shown(value)}; it must be {_words(hint)}")
    if hint is int and not _LEAST <= value <= _MOST:
        raise ValueError(f"{place} is {shown(value)}; it must fit 64 bits")
    return _members(origin, inner, value, place) if origin else value


def chosen(hints: dict[str, Any], content: object, place: str) -> dict[str, Any]:
    """Read the keys of a mapping that ``hints`` name, each as its type; other keys are ignored."""
    if not isinstance(content, dict):
        raise ValueError(f"{place} is {shown(content)}; it must be a group of keys")
    _check_there([name for name in hints if name not in content], place)
    return {name: checked(hint, content[name], f"{place}.{name}") for name, hint in hints.items()}


def _check_there(missing: list[str], place: str) -> None:
    if missing:
        raise ValueError(f"{place}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")


def _members(origin: Any, inner: tuple[Any, ...], value: Any, place: str) -> Any:
    """Check all members of a list, tuple or dict."""
    if inner[-1] is Any and (origin is not dict or all(type(key) is inner[0] for key in value)):
        return tuple(value) if origin is tuple else value
    if origin is list and all(type(each) is inner[0] and _in_range(each) for each in value):
        return value
    if origin is dict:
        return {checked(inner[0], k, place): checked(inner[1], v, f"{place}.{k}") for k, v in value.items()}
    assert origin is list or inner[1:] == (...,), "tuples of one length are not served"
    return origin(checked(inner[0], each, f"{place}[{i}]") for i, each in enumerate(value))


def _named(names: tuple[Any, ...], value: Any, place: str) -> Any:
    if any(value == name and type(value) is type(name) for name in names):
        return value
    raise ValueError(f"{place}: {unknown_name('value', value if isinstance(value, str) else shown(value), names)}")


def _finite(value: float, place: str) -> float:
    try:
        number = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{place} is {shown(value)}; it must be finite")
    return number


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    if isinstance(value, int) and abs(value) >= 2**63:  # Python refuses to write more than 4300 digits
        return "a number of more than 64 bits"
    return clipped("null" if value is None else repr(value), 60)


def _one_of(kinds: tuple[Any, ...], value: Any, place: str) -> Any:
    """Check a value against a union; if nothing takes it, raise the error of the only member beside None, if any."""
    last: ValueError | None = None
    for kind in sorted(kinds, key=lambda kind: (_parts(kind)[0] or kind) is not type(value)):
        try:
            return checked(kind, value, place)
        except ValueError as error:
            last = error if kind is not type(None) else last
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) == 1 and last is not None:
        raise last
    raise ValueError(f"{place} is {shown(value)}; it must be {' or '.join(map(_words, kinds))}")


def _words(hint: Any) -> str:
    origin = get_origin(hint) or hint
    if origin in (list, tuple):
        return "a list"
    return "a group of keys" if origin is dict or dataclasses.is_dataclass(origin) else WORDS.get(origin, str(origin))
