"""Finds media that the texts of a record name, in whatever spelling: no text may train without its picture in silence.

A *spelling* that only media have is refused wherever it stands: a tag around a target (``<img>0.png</img>``), or a
token of another model (``<|image_1|>``, ``<ImageHere>``, ``[IMG]``). In a record without media so are a numbered tag
(``<image 1>``) and a bare one (``<video>``, ``[image]``) as the first or last line of a question, or touching its first
letter or its end. What only names a file, in a link or in words, is text, as in questions about HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from subtoken_train.datasets.image_sources import PICTURE_SUFFIXES, VIDEO_SUFFIXES
from subtoken_train.families.literal_marks import IMAGE_MARK, VIDEO_MARK
from subtoken_train.typed import shown

SOUND_SUFFIXES = (".wav", ".mp3", ".flac", ".ogg", ".m4a", ".aac", ".opus")
MEDIA_SUFFIXES = (*PICTURE_SUFFIXES, ".heic", ".heif", ".svg", *VIDEO_SUFFIXES, *SOUND_SUFFIXES)
_KIND = r"(?:images?|imgs?|pictures?|pics?|photos?|frames?|videos?|vids?|vision|visual|audios?|speech|sound|media)"
_TAG = re.compile(
    rf"(?<!\\)[<\[]({_KIND}(?:[_-](?:path|url|file|src))?)\b[^<>\[\]\n]{{0,200}}[>\]]"
    r"([^<>\[\]\n]{1,400})[<\[]/\1\s{0,9}[>\]]",
    re.I,
)
_PLACE = re.compile(r"(?:data|file|https?):", re.I)
_TOKEN = re.compile(
    rf"<\|[\w ./:-]{{0,40}}(?:(?<![a-z])|(?<=of)){_KIND}[\w ./:-]{{0,400}}\|>|"
    rf"<{_KIND}(?:[ _-]?(?:\d{{1,4}}|here|place[ _-]?holder|tokens?|pad|start|end|context|soft[ _-]token|patch))+>|"
    rf"<(?:(?:start|begin|end)_of_|fake_token_around_|unk_){_KIND}>|<im_(?:start|end|patch)>",
    re.I,
)
_NUMBERED = re.compile(rf"<{_KIND}[ _-]?\d{{1,4}}>", re.I)
"""Matches what is a picture's name where the picture has a mark beside it."""
_CAPITALS = re.compile(r"\[(?:IMG|IMG_BREAK|IMG_END|AUDIO|BEGIN_AUDIO)\](?!https?:)")
"""Matches tokens of Mistral's models, which other spellings of the letters are not."""
_NAMED = rf"(?:[a-z]{{1,20}}_)?{_KIND}"
_BARE = re.compile(
    rf"(?:(?:<!--|__|[<\[{{(]{{1,2}})\s?/?{_NAMED}[ _-]?\d{{0,4}}\s?/?(?:-->|__|[>\])}}]{{1,2}})\s?)+", re.I
)
_GLUED = re.compile(rf"^<{_NAMED}>(?=[a-z])|(?<=[.?!])<{_NAMED}>$", re.I)
"""Matches a bare tag that touches a question's first letter, or its end; prose about HTML puts a space there."""
_INLINE = re.compile(r"data:(?:image|video|audio)/[\w.+-]{1,40};base64,[\w+/]{64}")
"""Matches a whole medium in a text; code that speaks of one leaves its letters out."""
_INSTEAD = f"name it in image, images, video or videos, and write {IMAGE_MARK} or {VIDEO_MARK} at its place"


def media_problem(turns: Iterable[dict[str, Any]], has_media: bool, as_document: bool) -> str | None:
    """Return what to say where a text of turns holds a spelling that only media have; None where none does.

    ``as_document``: they are for a language model, which reads placeholders as text.
    """
    for turn in turns:
        text = turn["value"]
        tokens = (token for token in _tokens(text) if not (has_media and _NUMBERED.fullmatch(token)))
        found = next(chain(_tagged(text), tokens), None)
        if found is None and not has_media and turn["from"] == "human":
            found = _bare(text, as_document)
        if found is not None:
            return f"a text holds {shown(found)}, a medium that nothing would read; {_INSTEAD}, or drop the record"
    return None


def _tagged(text: str) -> Iterator[str]:
    """Yield tags with a target inside: a path without spaces (of an image), a file of a medium, an address."""
    if "</" not in text and "[/" not in text:
        return
    for found in _TAG.finditer(text):
        target, kind = found[2].strip(), found[1].lower()
        if target and (
            (kind in ("img", "image") and " " not in target)
            or target.lower().partition("?")[0].endswith(MEDIA_SUFFIXES)
            or _PLACE.match(target)
        ):
            yield found[0]


def _tokens(text: str) -> Iterator[str]:
    if "<" in text:
        yield from (found[0] for found in _TOKEN.finditer(text))
    if "[" in text:
        yield from (found[0] for found in _CAPITALS.finditer(text))


def _bare(text: str, as_document: bool) -> str | None:
    """Return a bare tag that is the first or the last line of a longer text, or all of it; or a medium's own bytes."""
    if inline := _INLINE.search(text):
        return inline[0]
    for mark in (IMAGE_MARK, VIDEO_MARK) if as_document else (IMAGE_MARK,):
        text = text.replace(mark, "")
    if "</" not in text and (glued := _GLUED.search(text.strip())):
        return glued[0]
    lines = text.strip().split("\n")
    for line in (lines[0].strip(), lines[-1].strip()):
        if _BARE.fullmatch(line):
            return line
    return None
