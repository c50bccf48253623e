"""Fields of a record: read, obeyed, passed over as notes, or refused by one rule.

What nobody reads could change what is learnt or seen, so it is refused with the nearest name that is read. Names that
tell about a record or a medium, whatever they hold, are notes (``metadata`` takes any). An empty value (null, "", [],
{}) says nothing. The page ``docs/data_fields.md`` is made from these tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal

from subtoken_train.errors import clipped
from subtoken_train.typed import shown

Place = Literal["record", "message", "part"]
SWITCHES = (
    "loss", "trainable", "train", "training", "weight", "loss_weight", "loss_mask", "loss_scale", "supervise",
    "supervised",
)  # fmt: skip
"""Switches that say whether a message is learnt: true or 1, false or 0."""
READ: dict[Place, dict[tuple[str, ...], str]] = {
    "record": {
        ("id",): "names the record in messages",
        ("conversations", "messages"): "the messages",
        ("system", "system_prompt"): "before the first question",
        ("image", "images"): "a path, or a list of paths",
        ("video", "videos", "fps"): "folders or lists of frames; `video` is one, `videos` a list of them",
        ("kind",): "scores by kind",
    },
    "message": {
        ("from", "role", "value", "content"): "who says it, and what",
        SWITCHES: "false or 0: the message is read and not learnt; anything between is refused",
    },
    "part": {("type", "text", "image_url", "image", "path", "url"): "a text or an image"},
}  # names that are read or obeyed, and what they mean
_NOTE = re.compile(
    r"(^|_)(id|sizes?|width|height|hash|md5|sha256|format|count|num)$|^(num|n)_|^(u?uid|qid|idx|index|turn|order|"
    r"position|(data_)?sources?|dataset|origin|split|((source|coco|flickr)_)?urls?|(width|height)_list|title|comments?|"
    r"notes?|tags?|meta(data)?|model(_name)?|category|domain|topic|task|lang(uage)?|difficulty|name|authors?|date|"
    r"timestamp|license|version)$"
)
_CHANGING = re.compile(
    r"^(history|(chosen|rejected|tool|audio|tool_call|loss|mask|ignore|skip|exclude|discard|drop).*|speech|functions?|"
    r"(non_)?preferred_output|margin|objects|.*bbox.*|.*(input|token)_ids|labels|attention_mask)$"
)  # matches columns of a table that would change what is learnt; the others are printed
_LABELS = ("label", "kto_tag", "is_correct")  # of answers, good or bad
_NUMBER = re.compile(r"[-+]?\d*\.?\d+(e[-+]?\d+)?")
_NAMES = {place: frozenset(name for names in read for name in names) for place, read in READ.items()}


def check_fields(place: Place, found: Mapping[str, Any], said: str = "it") -> None:
    """Refuse names of a record, a message or a part that nobody reads; ``said``: its name, as ``message 2``."""
    for name in found:
        if name not in _NAMES[place] and not _NOTE.search(_plain(name)) and not _is_empty(found[name]):
            near = get_close_matches(_plain(name), sorted(_NAMES[place]), 1, 0.8)
            meant = f"did you mean {near[0]!r}?" if near else "drop it, or put it into metadata"
            raise ValueError(f"{said} has {clipped(repr(name), 60)}, {shown(found[name])}: nothing reads it; {meant}")


def column_problem(name: str, value: Any) -> str | None:
    """Return why a cell of a table that nothing reads may not be passed over; None where it may."""
    plain = _plain(name)
    if plain in (*SWITCHES, *_LABELS):
        off = not _is_on(value)
    else:
        off = bool(_CHANGING.match(plain)) and str(value).strip().lower() not in ("false", "0", "0.0")
    return "it may change what is learnt, and nothing reads it; drop the line, or the column" if off else None


@lru_cache(maxsize=10_000)
def _plain(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[ -]", "_", name.strip()).lower()


def _is_on(value: Any) -> bool:
    """Return whether a cell says that a line is learnt; a class's name is a note."""
    if isinstance(value, str):
        word = value.strip().lower()
        return word in ("true", "1", "1.0") or (word != "false" and not _NUMBER.fullmatch(word))
    return isinstance(value, bool | int | float) and value == 1


def read_switch(found: Mapping[str, Any], said: str) -> bool | None:
    """Return whether a message is to be learnt, by its own ``SWITCHES``; None where it has none."""
    values = {name: found[name] for name in SWITCHES if found.get(name) is not None}
    for name, value in values.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(
                f"{said} has {name} {shown(value)}; true or 1 (learnt) and false or 0 (read only) are obeyed, weights "
                "in between and switches of single tokens are not: write one of them, or drop the record"
            )
    if len(set(values.values())) > 1:
        raise ValueError(f"{said} has {' and '.join(values)}, which contradict each other; keep one")
    return next(map(bool, values.values()), None)


def _is_empty(value: Any, deep: int = 8) -> bool:
    if isinstance(value, dict | list):
        return deep > 0 and all(_is_empty(x, deep - 1) for x in (value.values() if isinstance(value, dict) else value))
    return value is None or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null"))
