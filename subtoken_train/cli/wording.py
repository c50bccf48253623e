"""Reword jsonargparse's complaints in one line: the key, what was got, what is allowed, the nearest name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from subtoken_train.errors import clipped, first_names, unknown_name
from subtoken_train.typed import WORDS

_UNKNOWN_KEY = re.compile(r"(?:Group '(?P<group>[\w.]+)' does not accept option|Option) '(?P<key>[\w.\-]+)'")
_UNKNOWN_ARGUMENT = re.compile(r"unrecognized arguments: (?P<argument>[^\s=]+)")
_KEY = re.compile(r'Parser key "(?P<key>[\w.]+)"')
_VALUE = re.compile(
    r"(?:Got value:|Given value:|Unable to load config) (?P<value>.*?)(?= Expected a | Given value type|$)"
)
_EMPTY = re.compile(r"(Got value:|Given value:)[ \t]*$", re.MULTILINE)
_TYPES = re.compile(r"Subtypes: \[(?P<union>.*?)\] Errors|Expected a (?P<one><class '[\w.]+'>|typing\.\w+\[.*?\])")
_MISSING = re.compile(r"the following arguments are required: (?P<keys>.+?)(?= Expected a |$)")
_TYPE_WORDS = {kind.__name__: words for kind, words in WORDS.items()}
_TYPE_WORDS |= dict.fromkeys(("tuple", "list"), "a list in brackets, such as [one, two]")
_ERRORS = re.compile(r"^Errors:\n(?P<errors>.*?)^Given value", re.MULTILINE | re.DOTALL)
_TRIED = ("Expected a ", "Not a valid subclass", "Does not validate")
_GROUP = "a group of keys"
_SHOWN, _LONGEST = 60, 300
"""Characters of a value, and of a message that is not ours."""


def reworded(message: str, keys: Iterable[str]) -> str:
    """Return what jsonargparse says, over several lines and with the names of Python types, as one short line."""
    message = message.replace('Parser key "config":', "")  # the recipe itself, which is handed over as a text
    message = _EMPTY.sub(r"\1 ''", message)
    text = " ".join(line.strip(" -") for line in message.splitlines() if line.strip(" -"))
    if found := _UNKNOWN_KEY.search(text):
        outer = _key_path(text[: found.start()])
        return unknown_key("key", ".".join(filter(None, (outer, found["group"], found["key"]))), keys)
    if found := _UNKNOWN_ARGUMENT.search(text):
        return unknown_key("option", found["argument"].removeprefix("--"), keys, prefix="--")
    if found := _MISSING.search(text):
        if group := _key_path(text[: found.start()]):
            return f"{group}.{found['keys']} is not set"
        return f"{found['keys']} is not set; pass a recipe with --config ('subtoken-train recipes ls' lists them)"
    if _KEY.search(text) and _VALUE.search(text):
        return _wrong_value(text)
    return clipped(text, _LONGEST)


def own_words(message: str) -> str:
    """Return what a class said when the parser built it; for a union, the parser repeats all that it tried."""
    errors = _ERRORS.search(message)
    said = [] if errors is None else re.findall(r"^\s*- (.+)$", errors["errors"], re.MULTILINE)
    return next((line for line in said if not line.startswith(_TRIED)), message)


def unknown_key(kind: str, key: str, keys: Iterable[str], prefix: str = "") -> str:
    """Return the message for a key that no recipe has, with the nearest one, or those beside it."""
    keys = list(keys)
    head = f"unknown {kind} {prefix + key!r}."
    if near := _nearest(key, keys):
        return f"{head} Did you mean {prefix + near!r}?"
    group = key.rpartition(".")[0]
    if beside := _below(group, keys):
        return f"{head} Allowed in {group}: {first_names(beside)}"
    if "." in group:  # no group either
        return unknown_key(kind, group, keys, prefix)
    return f"{head} 'subtoken-train recipes show tiny_fastv25_s16k4' prints a complete recipe"


def _below(group: str, keys: list[str]) -> list[str]:
    """Return the names of keys and groups in a group."""
    within = f"{group}."
    return [*dict.fromkeys(name.removeprefix(within).partition(".")[0] for name in keys if name.startswith(within))]


def _nearest(key: str, keys: list[str]) -> str | None:
    """Find the key most likely meant: a similar name in the group, a similar group, or a similar name below the group.

    Of a group that there is not, a similar name anywhere.
    """
    group, _, leaf = key.rpartition(".")
    beside = [name for name in keys if name.rpartition(".")[0] == group]
    names = {name.rpartition(".")[2]: name for name in beside}
    if near := difflib.get_close_matches(leaf, names, n=1, cutoff=0.6):
        return names[near[0]]
    if group and (near := difflib.get_close_matches(leaf, _below(group, keys), n=1, cutoff=0.8)):
        return f"{group}.{near[0]}"
    if not beside and (near := difflib.get_close_matches(key, keys, n=1, cutoff=0.8)):
        return near[0]
    within = f"{group}." if group and beside else ""
    below = {name.rpartition(".")[2]: name for name in keys if name.startswith(within)}
    near = difflib.get_close_matches(leaf.replace("-", "_"), below, n=1, cutoff=0.8)
    return below[near[0]] if near else None


def unexpected_argument(argument: str) -> str:
    """Return the message for a word that is neither an option nor its value."""
    is_recipe = argument.endswith((".yaml", ".yml"))
    hint = f"a recipe is passed as --config {argument}" if is_recipe else "options start with --"
    return f"unexpected argument {argument!r}; {hint}"


def _key_path(text: str) -> str:
    """Return the whole key of a complaint; nested groups name their keys one by one, or repeat them in full."""
    path = ""
    for found in _KEY.finditer(text):
        path = found["key"] if not path or found["key"].startswith(path) else f"{path}.{found['key']}"
    return path


def _wrong_value(text: str) -> str:
    """Return the message for a value of the wrong type, which the last key named holds."""
    key = _key_path(text)
    complaint = text[text.rindex("Parser key ") :]
    value, types = _VALUE.search(complaint), _TYPES.search(complaint)
    got = value["value"].strip("'\"") if value else ""
    allowed = (types["union"] or types["one"]) if types else ""
    literals = " ".join(re.findall(r"typing\.Literal\[(.*?)\]", allowed))
    if choices := re.findall(r"'([^']+)'", literals):
        return str(unknown_name(key, clipped(got, _SHOWN), choices))
    classes = re.findall(r"<class '([\w.]+)'>|\bdict\[", allowed)  # '' for a dict, which stands among others
    words = dict.fromkeys(_TYPE_WORDS.get(name, _GROUP) for name in classes) or [_GROUP]
    return f"{key} is {clipped(got, _SHOWN)!r}; it must be {' or '.join(words)}"
