"""Words of multiple-choice prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from string import ascii_uppercase

LETTER_ANSWER = "\nAnswer with the option's letter from the given choices directly."
"""LLaVA-1.5's words for letters; lmms-eval's default too."""


def lettered(options: Mapping[str, str] | Iterable[str]) -> str:
    """``A. first``, ``B. second``, ... in lines."""
    pairs = options.items() if isinstance(options, Mapping) else zip(ascii_uppercase, options, strict=False)
    return "\n".join(f"{letter}. {option}" for letter, option in pairs)
