r"""Tells marks of pictures from text that only looks like them: ``<image>`` from ``\<image>``, ``<video>`` likewise.

A mark stands for a picture; behind a backslash it is text, the backslash left out. Such text must reach the model as
its characters, also where the tokenizer has a token of that very name: prompts are rendered with stand-ins of equal
length in its place, which no text can hold, and tokenised by a copy of the tokenizer that calls its token otherwise.
Language models know no marks, and so no escape.
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
"""Halves of characters, which texts are refused for."""
_RENAMED = {IMAGE_MARK: "\ufdd0" + "\ufdd2" * 5 + "\ufdd1", VIDEO_MARK: "\ufdd0" + "\ufdd3" * 5 + "\ufdd1"}
"""Names of such tokens in the copy; characters that Unicode keeps for such use."""


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


def shown_again(text: str) -> str:
    """Return a text with its stand-ins as the characters that they stand for; of equal length."""
    for mark, stand_in in _HIDDEN.items():
        text = text.replace(stand_in, mark)
    return text


def tokenise(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a rendered text, and the character that each begins with; no special token is added.

    Args:
        tokenizer: a fast one, or one whose characters nobody asks for.
        text: with placeholders of pictures, and stand-ins for what is text.

    Raises:
        ValueError: the tokenizer cannot do without its token.
    """
    if not any(stand_in in text for stand_in in _HIDDEN.values()):
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
        return encoding["input_ids"], [start for start, _ in encoding.get("offset_mapping", ())]
    for mark, name in _RENAMED.items():
        text = text.replace(mark, name)
    encoded = _renaming(tokenizer).encode(shown_again(text), add_special_tokens=False)
    return encoded.ids, [start for start, _ in encoded.offsets]


@lru_cache(maxsize=4)
def _renaming(tokenizer: Any) -> Tokenizer:
    """Return a copy of a tokenizer in which the tokens ``<image>`` and ``<video>`` have other names."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["truncation"] = rules["padding"] = None
    for token in rules["added_tokens"]:
        token["content"] = _RENAMED.get(token["content"], token["content"])
    vocabulary = rules["model"]["vocab"]
    if isinstance(vocabulary, dict):
        rules["model"]["vocab"] = {_RENAMED.get(name, name): number for name, number in vocabulary.items()}
    else:
        rules["model"]["vocab"] = [[_RENAMED.get(name, name), score] for name, score in vocabulary]
    try:
        return Tokenizer.from_str(json.dumps(rules))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(
            f"this tokenizer cannot write <image> as text ({' '.join(str(error).split())[:120]}); write it otherwise"
        ) from None
