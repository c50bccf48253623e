"""Build dataclasses from the plain values of a file or the texts of a command line, every name and type checked."""

import dataclasses
import inspect
import math
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from subtoken_train.documents import parse_yaml
from subtoken_train.errors import clipped, first_names, refuse, unknown_name

T = TypeVar("T")
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
"""The plain types in words."""
_LEAST, _MOST = -(2**63), 2**63 - 1


def typed(kind: type[T], content: object, place: str) -> T:
    """Build a dataclass from a mapping.

    Fields may be int, float, bool, str, None, Any, Literal, list, tuple[X, ...], dict[str, X], unions of them, and
    dataclasses. ``place``: file and key, for messages.
    """
    assert dataclasses.is_dataclass(kind)
    if not isinstance(content, dict):
        raise ValueError(f"{place} is {shown(content)}; it must be a group of keys")
    plan = plan_of(kind)
    if unknown := content.keys() - plan.hints.keys():
        raise ValueError(f"{place}: {unknown_name('key', next(n for n in content if n in unknown), plan.hints)}")
    _check_there([name for name in plan.required if name not in content], place)
    made = dict(content)
    for name, value in content.items():
        if type(value) not in plan.exact[name] or not _in_range(value):
            made[name] = checked(plan.hints[name], value, f"{place}: {name}")
    return kind(**made)


def own_settings(kind: type | None, options: Mapping[str, Any], place: str, owner: str) -> Any:
    """Build the settings that a method declares for itself, by what a file says of them; None: it declares none."""
    if options and (kind is None or not dataclasses.fields(kind)):
        names = first_names([str(name) for name in options])
        raise ValueError(f"{owner} has no settings of its own, and {place} names {names}: leave it out")
    return None if kind is None else typed(kind, dict(options), place)


@dataclasses.dataclass(frozen=True)
class SettingsPlan:
    """Settings that a class takes: fields of a dataclass, else parameters of its constructor.

    A ``SettingsPlan`` in the place of a type is a group of settings; ``exact``: plain types that need no second look.
    """

    kind: Any
    hints: dict[str, Any]
    defaults: dict[str, Any]
    exact: dict[str, frozenset[type]] = dataclasses.field(default_factory=dict)

    @property
    def required(self) -> list[str]:
        """Names without a default."""
        return [name for name in self.hints if name not in self.defaults]


@cache
def plan_of(kind: Any) -> SettingsPlan:
    """Return the settings of a class, in order."""
    if not dataclasses.is_dataclass(kind):
        every, given = get_type_hints(kind.__init__), inspect.signature(kind).parameters.items()
        hints = {name: every[name] for name, _ in given}
        return SettingsPlan(kind, hints, {name: each.default for name, each in given if each.default is not each.empty})
    every, fields = get_type_hints(kind), [field for field in dataclasses.fields(kind) if field.init]
    hints = {field.name: every[field.name] for field in fields}
    made = {each.name: each.default_factory() for each in fields if each.default_factory is not dataclasses.MISSING}
    defaults = {each.name: each.default for each in fields if each.default is not dataclasses.MISSING} | made
    return SettingsPlan(kind, hints, defaults, {name: frozenset(_scalars(hint)) for name, hint in hints.items()})


def group_of(hint: Any) -> SettingsPlan | None:
    """Return the settings behind a type: a dataclass, alone or in a union; None: it is one value."""
    if isinstance(hint, SettingsPlan):
        return hint
    kind = next((part for part in (hint, *get_args(hint)) if dataclasses.is_dataclass(part)), None)
    return None if kind is None else plan_of(kind)  # type: ignore[arg-type]


class Written(str):
    """A text from a command line, of which only the wanted type says what value it writes."""


def written_as(hint: Any, value: Any, place: str) -> Any:
    """Return a value as a type; a text may write one of another type (``1e-4``, ``true``, ``[a, b]``, null).

    A text in a file stays one where the type takes texts; one of a command line does where it writes nothing else.
    """
    if hint is Any or isinstance(value, dict):
        value = unwritten(value)
    tries = [value]
    if isinstance(value, str):
        tries = [str(value), *text_numbers(value)]
        with suppress(ValueError):
            tries = [parse_yaml(value, place), *tries[1:], tries[0]] if isinstance(value, Written) else tries
    for each in tries:
        with suppress(ValueError):
            return checked(hint, each, place)
    return checked(hint, tries[0], place)


def unwritten(value: Any) -> Any:
    """Return a value with each text of a command line in it as the number, true, false or null that it writes."""
    if isinstance(value, dict):
        return {key: unwritten(each) for key, each in value.items()}
    if not isinstance(value, Written):
        return value
    with suppress(ValueError):
        content = parse_yaml(value, "")
        if content is None or isinstance(content, bool | int | float):
            return content
    return next(text_numbers(value), str(value)) if any(map(str.isdigit, value)) else str(value)


def text_numbers(text: str, *kinds: type[float]) -> Iterator[float]:
    """Yield the numbers that a text writes: whole (unless ``kinds`` says otherwise), and with a point or exponent."""
    for kind in kinds or (int, float):
        with suppress(ValueError):
            yield kind(text)


class Settings(dict[str, Any]):
    """Nested settings, whose values are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def filled(plan: SettingsPlan, content: Mapping[str, Any], prefix: str = "") -> Settings:
    """Return nested settings with their defaults, every type checked; names that are not theirs are ignored."""
    values = Settings()
    for name, hint in plan.hints.items():
        key, group = f"{prefix}{name}", group_of(hint)
        if name not in content:
            refuse((name not in plan.defaults and group is None, f"{key} is not set, and has no default"))
            default = plan.defaults.get(name, {})
            values[name] = filled(group, {}, f"{key}.") if group and name not in plan.defaults else default
            continue
        value = content[name]
        optional = type(None) in (hint, *get_args(hint)) or hint is Any
        if isinstance(value, Written) and value in ("null", "~"):
            value = None
        refuse((value is None and not optional, f"{key} is null; give it a value, or leave the key out"))
        if group is not None and value is not None:
            if not isinstance(value, dict):
                raise ValueError(f"{key} is {shown(value)}; it must be a group of keys{' or null' if optional else ''}")
            values[name] = filled(group, value, f"{key}.")
        else:
            values[name] = None if value is None else written_as(hint, value, key)
    return values


def built(plan: SettingsPlan, values: Mapping[str, Any]) -> Any:
    """Build what settings describe, inner groups first."""
    made = dict(values)
    for name, hint in plan.hints.items():
        if (group := group_of(hint)) is not None and isinstance(made[name], dict):
            made[name] = built(group, made[name])
    return plan.kind(**made)


@cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


def _scalars(hint: Any) -> list[type]:
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
        if not abs(value) <= sys.float_info.max:  # a whole number may have hundreds of digits
            raise ValueError(f"{place} is {shown(value)}; it must be finite")
        return float(value)
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
    refuse((missing, f"{place}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"))


def _members(origin: Any, inner: tuple[Any, ...], value: Any, place: str) -> Any:
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
    head, mark, key = place.rpartition(": ")
    got = value if isinstance(value, str) else shown(value)
    raise ValueError(f"{head}{mark}{unknown_name(key, got, dict.fromkeys(map(str, names)))}")


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
    if named := [name for kind in others if _parts(kind)[0] is Literal for name in get_args(kind)]:
        return _named(tuple(named), value, place)
    if len(others) == 1 and last is not None:
        raise last
    written = [kind for kind in kinds if kind is not int or float not in kinds]
    raise ValueError(f"{place} is {shown(value)}; it must be {' or '.join(map(_words, written))}")


def _words(hint: Any) -> str:
    origin = get_origin(hint) or hint
    if origin in (list, tuple):
        return "a list in brackets, such as [one, two]"
    group = origin is dict or dataclasses.is_dataclass(origin)
    return "a group of keys" if group else WORDS.get(origin, getattr(origin, "__name__", str(origin)))
