"""Read recipes by a bounded reader and check what they may say, before anything is parsed or imported.

All of it works without torch, transformers and lightning. Types, and keys below the bands, are left to the parser
(``cli/recipe.py``), which gets the very content that was checked here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from subtoken_train.cli.command_line import FLAGS, Words, split_words
from subtoken_train.cli.trainer_parts import KINDS, class_keys, loaded, named_parts
from subtoken_train.cli.trainer_ranges import SETTINGS, check_setting
from subtoken_train.cli.wording import unexpected_argument, unknown_key
from subtoken_train.documents import parse_yaml
from subtoken_train.errors import MAX_SEED, check_range
from subtoken_train.reducers import DEFAULT_REDUCER, split_settings
from subtoken_train.resources import named_recipe, recipe_text, resource
from subtoken_train.typed import shown

BANDS = ("model", "data", "trainer", "checkpoint", "evaluation", "early_stopping")
KEYS = (*BANDS, "seed_everything", "output_dir", "push_to_hub")
"""All that a recipe holds at its top; the flags stand in recipes that version 0.1 saved, as false."""
_OPTIONAL = ("evaluation", "early_stopping")
_MAX_NUMBER = 2**63
_COMMANDS = ("help", "h", "print_config")
_NO_PATH = "#" * 300 + "\n"  # longer than any file's name: the parser takes it for a text, not for a path
_EXAMPLE = "tiny_fastv25_s16k4"


@dataclass(frozen=True)
class RecipeSource:
    """Recipes and options that passed.

    Attributes:
        words: the command line.
        contents: of each recipe file, without flags.
        pieces: each option with a value, as the recipe that would say the same.
        reducer: name of the token reducer that they speak of.
    """

    words: Words
    contents: tuple[dict[str, Any], ...]
    pieces: tuple[dict[str, Any], ...]
    reducer: str

    def arguments(self) -> list[str]:
        """Return the parser's arguments: the contents as texts, and the options."""
        texts = [_NO_PATH + yaml.safe_dump(content, allow_unicode=True, sort_keys=False) for content in self.contents]
        return [f"--config={text}" for text in texts] + [
            f"--{key}" if value is None else f"--{key}={value}" for key, value in self.words.options
        ]

    def data_keys(self) -> set[str]:
        """Return the keys of the recipes' ``data`` bands."""
        bands = [content.get("data") for content in self.contents]
        return {key for band in bands if isinstance(band, dict) for key in band}


def read_source(argv: list[str]) -> RecipeSource:
    """Read and check the recipes (``--config``) and options of a command line; a mistake is a worded ``ValueError``."""
    words = split_words(argv)
    if words.stray:
        raise ValueError(unexpected_argument(words.stray[0]))
    contents = [_read_file(path) for path in words.configs]
    for content in contents:
        _check_content(content, "key")
    pieces = [_piece(key, text) for key, text in words.options]
    for piece in pieces:
        _check_content(piece, "option")
    named = [name for content in (*contents, *pieces) if isinstance(name := _reducer(content).get("name"), str)]
    reducer = named[-1] if named else DEFAULT_REDUCER
    whole = tuple(_with_own(content, reducer) for content in contents)
    given = tuple(piece for piece, (_, text) in zip(pieces, words.options, strict=True) if text is not None)
    return RecipeSource(words, whole, given, reducer)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """Read a saved recipe without the flags that version 0.1 saved; ``ValueError`` if it holds no keys.

    Nothing that it names is looked at.
    """
    content = parse_yaml(recipe_text(Path(path)), str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no keys; a recipe has the bands model, data and trainer")
    kept = {key: value for key, value in content.items() if key not in FLAGS}
    return _with_own(kept, str(_reducer(kept).get("name", DEFAULT_REDUCER)))


def _reducer(content: dict[str, Any]) -> dict[str, Any]:
    """Return the reducer's group of a recipe, empty if there is none."""
    band = content.get("model")
    group = band.get("reducer") if isinstance(band, dict) else None
    return group if isinstance(group, dict) else {}


def _with_own(content: dict[str, Any], reducer: str) -> dict[str, Any]:
    """Drop the other methods' defaults, which version 0.1 wrote into every recipe that it resolved."""
    group = _reducer(content)
    own, others = split_settings({**group, "name": reducer})
    kept = {key: value for key, value in group.items() if key in own or key in others}
    return content if kept == group else {**content, "model": {**content["model"], "reducer": kept}}


def _read_file(path: str) -> dict[str, Any]:
    content = parse_yaml(recipe_text(named_recipe(path)), path)
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{path} holds no keys; a recipe has the bands model, data and trainer")
    for key, value in content.items():
        if key in FLAGS and value in (False, None):
            continue
        if key in FLAGS:
            raise ValueError(
                f"{path} says {key}: {shown(value)}; that belongs on the command line: remove it there, and add "
                f"--{key} if you mean it"
            )
        if not isinstance(key, str) or key not in KEYS:
            raise ValueError(unknown_key("key", shown(key).strip("'"), [*KEYS, *known_keys()]))
        if key in BANDS and not isinstance(value, dict) and (value is not None or key not in _OPTIONAL):
            raise ValueError(f"{key} is {shown(value)}; it must be a group of keys")
    return {key: value for key, value in content.items() if key not in FLAGS}


def _piece(key: str, text: str | None) -> dict[str, Any]:
    """Return an option as the recipe that would say the same."""
    names = key.removesuffix("+").split(".")
    if key in _COMMANDS or names[0] in FLAGS:
        return {}
    if names[-1] == "help":
        raise ValueError(f"--{key} is not available; 'subtoken-train recipes show {_EXAMPLE}' prints a complete recipe")
    if key == "allow-code":
        raise ValueError(f"--{key} is gone: a recipe names no classes; see docs/recipe_safety.md for your own ones")
    if names[0] == "trainer" and names[1:2] and names[1] in KINDS and (len(names) > 2 or key.endswith("+")):
        raise ValueError(f"--{key} is not read; write the whole: --trainer.{names[1]}='{{NAME: {{SETTING: VALUE}}}}'")
    if names[0] not in KEYS:
        raise ValueError(unknown_key("option", key, known_keys(), prefix="--"))
    value: Any = None if text is None else loaded(text, f"--{key}")
    if isinstance(value, str):
        value = _scalar(value)
    for name in reversed(names):
        value = {name: value}
    return dict(value)


def _scalar(text: str) -> Any:
    """Return a plain text's value, so that ``null`` and numbers are what they would be in a file."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
    return value if value is None or isinstance(value, bool | int | float) else text


def _check_content(content: dict[str, Any], kind: str) -> None:
    """Check the seed, the ``trainer`` band, and that nothing leads to a class; other bands check themselves."""
    _check_sizes(content)
    seed = content.get("seed_everything")
    if isinstance(seed, bool):
        raise ValueError(f"seed_everything is {seed}; a run needs a seed: give a whole number")
    if isinstance(seed, int):
        check_range("seed_everything", seed, 0, MAX_SEED)
    band = content.get("trainer")
    for key, value in band.items() if isinstance(band, dict) else ():
        name = key.removesuffix("+")
        if name not in SETTINGS:
            raise ValueError(
                unknown_key(kind, f"trainer.{name}", known_keys(), prefix="--" if kind == "option" else "")
            )
        check_setting(name, value)
        if name in KINDS:
            named_parts(name, value)
    if (place := next(class_keys(content), None)) is not None:
        raise ValueError(
            f"{place} is not a key: a recipe names no class; what it may name is listed in docs/recipe_safety.md"
        )


def _check_sizes(content: Any, key: str = "a value") -> None:
    """Refuse numbers too large for the parser to turn into floats; the reader has bounded the depth."""
    if isinstance(content, int) and abs(content) > _MAX_NUMBER:
        raise ValueError(f"{key} is {shown(content)}; a number in a recipe has at most 19 digits")
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, value in items:
        _check_sizes(value, str(name) if key == "a value" else f"{key}.{name}")


def known_keys() -> list[str]:
    """List the keys that a misspelt one is compared with: ours, the trainer's, those of a complete recipe."""
    recipe = yaml.safe_load(resource(f"recipes/{_EXAMPLE}.yaml").read_text(encoding="utf-8"))
    return sorted({*KEYS, *FLAGS, *(f"trainer.{key}" for key in SETTINGS), *_below(recipe)} - {*BANDS})


def _below(content: dict[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _below(value, f"{prefix}{key}.")
        else:
            yield prefix + key
