"""The words behind ``fit``, ``check`` and ``preview``: recipes, options and flags, told apart."""

from __future__ import annotations

from dataclasses import dataclass

ALLOW_CODE = "--allow-code"
FLAGS = ("overwrite", "resume", "private")
"""What is said on the command line alone; a recipe that says it too would act on its own."""
_CONFIG = ("--config", "-c")
_BARE = (*(f"--{flag}" for flag in FLAGS), "--help", "-h", "--print_config")


@dataclass(frozen=True)
class Words:
    """A command line.

    Attributes:
        configs: recipe files in order.
        options: (key, text) in order; None where no text follows.
        stray: words that are none of these.
        allow_code: whether ``--allow-code`` was given.
    """

    configs: tuple[str, ...]
    options: tuple[tuple[str, str | None], ...]
    stray: tuple[str, ...]
    allow_code: bool


def split_words(argv: list[str]) -> Words:
    """Tell a command line's words apart.

    Raises:
        ValueError: an option before ``--config``, which the recipe would silently override, or ``--allow-code=...``.
    """
    configs: list[str] = []
    options: list[tuple[str, str | None]] = []
    stray: list[str] = []
    allow_code, place = False, 0
    while place < len(argv):
        word, place = argv[place], place + 1
        name, equals, text = word.partition("=")
        following = argv[place] if place < len(argv) and not _is_option(argv[place]) else None
        if name == ALLOW_CODE:
            if equals:
                raise ValueError(f"{ALLOW_CODE} takes no value; write it alone, or leave it out")
            allow_code = True
        elif not _is_option(word):
            stray.append(word)
        elif equals or word in _BARE or following is None:
            value = text if equals else "true" if name.removeprefix("--") in FLAGS else None
            _add(name, value, configs, options)
        else:
            _add(name, following, configs, options)
            place += 1
    return Words(tuple(configs), tuple(options), tuple(stray), allow_code)


def recipe_paths(argv: list[str]) -> list[str]:
    """The files that ``--config`` names, in order."""
    return list(split_words(argv).configs)


def _is_option(word: str) -> bool:
    return word.startswith("--") or word.partition("=")[0] in ("-c", "-h")


def _add(name: str, value: str | None, configs: list[str], options: list[tuple[str, str | None]]) -> None:
    if name not in _CONFIG:
        options.append((name.lstrip("-"), value))
        return
    if not value:
        raise ValueError(f"{name} names no file; write {name} RECIPE.yaml")
    if options and not configs:
        raise ValueError(f"--{options[0][0]} stands before --config and would be overridden by it; put --config first")
    configs.append(value)
