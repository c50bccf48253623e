r"""Tells marks of pictures from text that only looks like them: ``<image>`` from ``\<image>``, ``<video>`` likewise.

A mark stands for a picture; behind a backslash it is text, the backslash left out. Such text must reach the model as
its characters, also where the tokenizer has a token of that very name: prompts are rendered with stand-ins of equal
length in its place, which no text can hold, and tokenised by a copy of the tokenizer that calls its token otherwise.
Language models know no marks, and so no escape. What people write in a chat may look like a special token of the
tokenizer (``<|im_end|>``), which only its template writes: that is text in the same way.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from subtoken_train.types import Turn

IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"
_MARK = re.compile(r"(?<!\\)<(?:image|video)>")
_ESCAPED = re.compile(r"\\(<(?:image|video)>)")
_HIDDEN = {IMAGE_MARK: "\udfd0" * len(IMAGE_MARK), VIDEO_MARK: "\udfd1" * len(VIDEO_MARK)}
"""Halves of characters, which texts are refused for; those of special tokens count from ``_FIRST``."""
_FIRST, _MOST = 0xD800, 2000
_STAND_IN = re.compile("[\ud800-\udfff]")
_NAMES = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Characters that Unicode keeps for such use: a token's name in the copy is one of them, as often as it is long."""


def picture_marks(text: str) -> list[str]:
    """Return the marks of pictures in a text, in order."""
    return _MARK.findall(text) if has_marks(text) else []


def has_marks(text: str) -> bool:
    """Return whether a text holds a mark, or an escape of one: most hold neither, and need no look."""
    return IMAGE_MARK in text or VIDEO_MARK in text


def with_marks(text: str, image: str, video: str) -> str:
    """Return a text with other words in the place of its marks; escapes stay."""
    return _MARK.sub(lambda found: image if found[0] == IMAGE_MARK else video, text)


def unescaped(text: str) -> str:
    r"""Return a text as a reader sees it, ``\<image>`` as ``<image>``."""
    return _ESCAPED.sub(r"\1", text)


def escaped(text: str) -> str:
    r"""Return a text without pictures as a prompt writes it, ``<image>`` as ``\<image>``."""
    return with_marks(text, f"\\{IMAGE_MARK}", f"\\{VIDEO_MARK}")


def hidden(text: str, videos: bool = False) -> str:
    """Return a text with stand-ins for what is text of it; the marks that are left stand for pictures.

    ``videos``: whether ``<video>`` is a mark; where no video is shown it is text.
    """
    text = _ESCAPED.sub(lambda found: _HIDDEN[found[1]], text)
    return text if videos else text.replace(VIDEO_MARK, _HIDDEN[VIDEO_MARK])


def hidden_turn(turn: Turn, videos: bool = False) -> Turn:
    """Return a turn whose prompt and answer are ``hidden``."""
    answer = None if turn.answer is None else hidden(turn.answer, videos)
    return replace(turn, prompt=hidden(turn.prompt, videos), answer=answer)


def hidden_specials(tokenizer: Any, text: str) -> str:
    """Return a text with stand-ins for what looks like a special token of the tokenizer; see ``tokenise``.

    Raises:
        ValueError: the tokenizer has too many special tokens to tell one of them from text.
    """
    places, pattern = _specials(tokenizer)
    return pattern.sub(lambda found: _special_stand_in(places[found[0]], found[0]), text)


def _special_stand_in(place: int, token: str) -> str:
    if place >= _MOST:
        raise ValueError(f"{token!r} is a special token of the tokenizer, which has too many; write it differently")
    return chr(_FIRST + place) * len(token)


@lru_cache(maxsize=4)
def _specials(tokenizer: Any) -> tuple[dict[str, int], re.Pattern[str]]:
    """Return the special tokens with their places, and the pattern that finds the longest."""
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    longest = sorted(map(re.escape, tokens), key=len, reverse=True)
    return {token: place for place, token in enumerate(tokens)}, re.compile("|".join(longest) or "(?!)")


def tokenise(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a rendered text, and the character that each begins with; no special token is added.

    Args:
        tokenizer: a fast one, or one whose characters nobody asks for.
        text: with placeholders of pictures, and stand-ins for what is text.

    Raises:
        ValueError: the tokenizer cannot do without its token.
    """
    stand_ins = set(_STAND_IN.findall(text))
    if not stand_ins:
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
        return encoding["input_ids"], [start for start, _ in encoding.get("offset_mapping", ())]
    hidden_as = {token: stand_in for token, stand_in in _HIDDEN.items() if stand_in[0] in stand_ins}
    for token, place in _specials(tokenizer)[0].items():
        if place < _MOST and chr(_FIRST + place) in stand_ins:
            hidden_as[token] = _special_stand_in(place, token)
    renamed = {token: name * len(token) for token, name in zip(sorted(hidden_as), _NAMES, strict=False)}
    if len(renamed) < len(hidden_as):
        raise ValueError(f"a text holds {len(hidden_as)} special tokens of the tokenizer; write them differently")
    for token, name in renamed.items():
        text = text.replace(token, name)
    for token, stand_in in hidden_as.items():
        text = text.replace(stand_in, token)
    encoded = _renaming(tokenizer, tuple(renamed.items())).encode(text, add_special_tokens=False)
    return encoded.ids, [start for start, _ in encoded.offsets]


@lru_cache(maxsize=4)
def _renaming(tokenizer: Any, names: tuple[tuple[str, str], ...]) -> Tokenizer:
    """Return a copy of a tokenizer in which some tokens have other names."""
    renamed, rules = dict(names), json.loads(tokenizer.backend_tokenizer.to_str())
    rules["truncation"] = rules["padding"] = None
    for token in rules["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    vocabulary = rules["model"]["vocab"]
    if isinstance(vocabulary, dict):
        rules["model"]["vocab"] = {renamed.get(name, name): number for name, number in vocabulary.items()}
    else:
        rules["model"]["vocab"] = [[renamed.get(name, name), score] for name, score in vocabulary]
    try:
        return Tokenizer.from_str(json.dumps(rules))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(
            f"this tokenizer cannot write {names[0][0]} as text ({' '.join(str(error).split())[:120]}); write it "
            "otherwise"
        ) from None
