r"""Tells marks of pictures from text that only looks like them: ``<image>`` from ``\<image>``, ``<video>`` likewise.

Such text, and what looks like a special token (``<|im_end|>``), must reach the model as characters. Prompts are
rendered with a stand-in (half a character) for each; special tokens in a rendered text are then the template's. It is
tokenised by a copy of the tokenizer in which special tokens have names that the text does not hold.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from subtoken_train.types import Turn

IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"
_MARK = re.compile(r"(?<!\\)<(?:image|video)>")
_ESCAPED = re.compile(r"\\(<(?:image|video)>)")
_STAND_IN = re.compile("[\ud800-\udfdf]")
_TURN = re.compile(r"\W.*\w.*\W")
_NEAR, _FAR = 0xDF00 - 0xD800, 0xDFE0 - 0xDF00  # characters with a stand-in: Unicode's first, and a tokenizer's
_SHOWN = {chr(0xD800 + each): chr(each) for each in range(_NEAR)}
_PRIVATE = range(0xF0000, 0x10FFFE)  # Unicode's private use: names of tokens in the copy, as often as they are long


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
    """Return a text with stand-ins for what is text of it; ``<video>`` is a mark only where ``videos`` are shown."""
    text = _ESCAPED.sub(lambda found: _stand_ins(found[1]), text)
    return text if videos else text.replace(VIDEO_MARK, _stand_ins(VIDEO_MARK))


def as_text(family: Any, text: str, videos: bool = False) -> str:
    """Return what people write with stand-ins for all that is text of it; a placeholder of pictures stays."""
    if not family.sees_images:
        return hidden_specials(family.tokenizer, text)
    return hidden_specials(family.tokenizer, hidden(text, videos), (IMAGE_MARK, VIDEO_MARK, *family.placeholders))


def hidden_turn(family: Any, turn: Turn, videos: bool = False) -> Turn:
    """Return a turn whose prompt and answer are ``as_text``."""
    answer = None if turn.answer is None else as_text(family, turn.answer, videos)
    return replace(turn, prompt=as_text(family, turn.prompt, videos), answer=answer)


def hidden_specials(tokenizer: Any, text: str, kept: Sequence[str] = ()) -> str:
    """Return a text with stand-ins for what looks like a special token, or, at its edges, a part of one."""
    specials = _specials(tokenizer)
    text = specials.pattern.sub(lambda each: each[0] if each[0] in kept else _stand_ins(each[0], specials.far), text)
    for size in range(min(len(text), specials.longest - 1), 0, -1):
        if text[-size:] in specials.beginnings:
            text = text[:-size] + _stand_ins(text[-size:], specials.far)
        if text[:size] in specials.endings:
            text = _stand_ins(text[:size], specials.far) + text[size:]
    return text


def special_places(tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Return where the special tokens of a rendered text begin and end."""
    return [found.span() for found in _specials(tokenizer).pattern.finditer(text)]


def _stand_ins(text: str, far: str = "") -> str:
    return "".join(chr(0xD800 + ord(each) if ord(each) < _NEAR else 0xDF00 + far.index(each)) for each in text)


@dataclass(frozen=True)
class _Specials:
    """Special tokens of a tokenizer, and added ones that its chat template writes; not two that enclose a part."""

    places: dict[str, int]  # each with a number of its own
    ids: frozenset[int]  # but for that of unknown text
    pattern: re.Pattern[str]  # finds the longest
    beginnings: frozenset[str]  # parts, not the whole
    endings: frozenset[str]
    longest: int
    far: str  # characters of them that are not among Unicode's first


@lru_cache(maxsize=4)
def _specials(tokenizer: Any) -> _Specials:
    added = {token.content: (number, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
    written = str(tokenizer.chat_template or "")
    # DeepSeek's <|User|> is not marked as special, but its template writes it; <think> and </think> are an answer's
    held = {
        name: number
        for name, (number, special) in added.items()
        if special
        or (name in written and _TURN.fullmatch(name) and not added.keys() & {f"</{name[1:]}", f"<{name[2:]}"})
    }
    held |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    tokens = [token for token in held if token]
    far = "".join(sorted({each for token in tokens for each in token if ord(each) >= _NEAR}))
    if len(far) > _FAR:
        raise ValueError(f"the tokenizer's special tokens have {len(far)} rare characters, more than {_FAR}")
    longest = sorted(map(re.escape, tokens), key=len, reverse=True)
    return _Specials(
        {token: place for place, token in enumerate(tokens)},
        frozenset(held.values()) - {tokenizer.unk_token_id},
        re.compile("|".join(longest) or "(?!)"),
        frozenset(token[:size] for token in tokens for size in range(1, len(token))),
        frozenset(token[-size:] for token in tokens for size in range(1, len(token))),
        max(map(len, tokens), default=0),
        far,
    )


def tokenise(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a rendered text, and (of a fast tokenizer) the character that each begins with."""
    specials = _specials(tokenizer)
    if not _STAND_IN.search(text):
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
        ids: list[int] = encoding["input_ids"]
        # text may become a token that it only resembles (a wide <, for one) once it is normalised
        if sum(each in specials.ids for each in ids) <= sum(1 for _ in specials.pattern.finditer(text)):
            return ids, [start for start, _ in encoding.get("offset_mapping", ())]
    held, size = {ord(each) for each in text if each >= chr(_PRIVATE[0])}, max(1, len(specials.places))
    first = next((at for at in _PRIVATE[:-size:size] if held.isdisjoint(range(at, at + size))), None)
    if first is None:
        raise ValueError("the prompt holds too many characters of private use; leave them out")
    text = specials.pattern.sub(lambda found: chr(first + specials.places[found[0]]) * len(found[0]), text)
    text = _STAND_IN.sub(lambda found: _SHOWN.get(found[0]) or specials.far[ord(found[0]) - 0xDF00], text)
    encoded = _renaming(tokenizer, first).encode(text, add_special_tokens=False)
    return encoded.ids, [start for start, _ in encoded.offsets]


@lru_cache(maxsize=4)
def _renaming(tokenizer: Any, first: int) -> Tokenizer:
    """Return a copy of a tokenizer in which special tokens have other names, in characters from a first one on."""
    renamed = {token: chr(first + place) * len(token) for token, place in _specials(tokenizer).places.items()}
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules["truncation"] = rules["padding"] = None
    for token in rules["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    model = rules["model"]
    if isinstance(vocabulary := model["vocab"], dict):
        model["vocab"] = {renamed.get(name, name): number for name, number in vocabulary.items()}
    else:
        model["vocab"] = [[renamed.get(name, name), score] for name, score in vocabulary]
    if "unk_token" in model:
        model["unk_token"] = renamed.get(model["unk_token"], model["unk_token"])
    try:
        return Tokenizer.from_str(json.dumps(rules))
    except Exception:  # the library raises Exception itself
        raise ValueError("this tokenizer cannot write its special tokens as text; leave them out") from None
