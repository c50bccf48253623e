"""Fields of a record: read, obeyed, refused, or passed over and counted aloud.

What would change what is learnt or seen is refused unless it is obeyed: a name that means such a thing (``REFUSED``,
with a remedy each), that looks like a medium or a switch, or holds a medium, and one that is nearly a name that is
read. Anything else is passed over, and ``check`` lists it. An empty value (null, "", [], {}) says nothing. The page
``docs/data_fields.md`` is made from these tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal

from subtoken_train.datasets.text_media import MEDIA_SUFFIXES
from subtoken_train.errors import clipped
from subtoken_train.typed import shown

Place = Literal["record", "message", "part"]
SWITCHES = (
    "loss", "trainable", "train", "training", "weight", "loss_weight", "loss_mask", "loss_scale", "supervise",
    "supervised",
)  # fmt: skip
"""Switches that say whether a message is learnt: true or 1, false or 0."""
LABELS = ("label", "kto_tag", "is_correct")  # switches that say whether the answer is a good one
READ: dict[Place, dict[tuple[str, ...], str]] = {
    "record": {
        ("id",): "names the record in messages",
        ("conversations", "messages"): "the messages",
        ("system", "system_prompt"): "before the first question",
        ("image", "images"): "a path, or a list of paths",
        ("video", "videos", "fps"): "folders or lists of frames; `video` is one, `videos` a list of them",
        ("kind",): "scores by kind",
        LABELS: "`true`: the answer is learnt as any other; `false`, or anything else, is refused",
        SWITCHES: "true or 1 says nothing; a list has one switch for each message; all else is refused",
    },
    "message": {
        ("from", "role", "value", "content"): "who says it, and what",
        SWITCHES: "false or 0: the message is read and not learnt; anything between is refused",
    },
    "part": {("type", "text", "image_url", "image", "path", "url"): "a text or an image"},
}  # names that are read or obeyed, and what they mean
_TOKENS = "switches of single tokens are not obeyed; give a message loss: true or false"
_FRAME = "it changes the chat format, which is the backbone's own here; drop it"
_ELSEWHERE = "it is not read; name pictures in image or images, videos in video or videos"
REFUSED: tuple[tuple[tuple[Place, ...], str, str], ...] = (
    (("record",), "chosen chosen_response chosen_messages rejected rejected_* preferred_output non_preferred_output "
     "margin positive_messages negative_messages",
     "preferences are not trained; write the answer to learn as the last message, and drop the rest"),
    (("record", "message"), "tools tool_call* tool_choice functions function_call",
     "tools are not trained; drop the record, or its tools"),
    (("record", "message"), "audio audios audio_path audio_url speech", "sound is not read; drop the record"),
    (("record", "message"), "objects ref *bbox* box boxes region regions mask masks segmentation* points polygons "
     "keypoints", "places in a picture are not read; write them into the texts, or drop the record"),
    (("record", "message"), "labels input_ids token_ids attention_mask position_ids assistant_mask* completion_mask "
     "response_mask prompt_mask loss_masks train*_detail token_weights", _TOKENS),
    (("record",), "mask_history train_on_inputs train_on_prompt",
     "say it message by message, with loss: true or false"),
    (("record",), "enable_thinking chat_template* add_generation_prompt continue_final_message", _FRAME),
    (("message",), "prefix", _FRAME),
    (("record",), "documents", "it is put into the prompt there and not here; write it into the question"),
    (("record",), "history", "earlier turns are not read from it; write them as messages"),
    (("message",), "reasoning_content reasoning thinking refusal",
     "it is not part of the answer here; write it into the answer, or drop it"),
    (("record",), "img image_path* image_file* image_url* image_folder image_dir video_path video_url video_file "
     "video_dir frames frame_folder pixel_values data_path", _ELSEWHERE),
    (("message",), "image images video videos",
     "name pictures beside the messages (image, images, video, videos) or in parts of the content"),
    (("record", "part"), "video_start video_end start_time end_time min_pixels max_pixels resized_height resized_width",
     "it changes what is seen and is not obeyed (data.max_image_pixels and backbone.max_pixels are); drop it"),
)  # fmt: skip
"""Names that other trainers read (a * stands for any letters), where they stand, and why they are refused."""

_NOTE = re.compile(
    r"(^|_)(ids?|sizes?|width|height|hash|md5|type|format|count|num)$|^(num|n)_|^(u?uid|qid|idx|index|(data_)?sources?|"
    r"dataset|origin|split|((source|coco|flickr)_)?urls?|(width|height)_list|title|comments?|notes?|tags?|sha256)$"
)  # matches names that tell about a record or a medium, whatever they hold; nobody misses them
_MEDIUM = re.compile(
    r"image|img|photo|picture|video|audio|speech|bbox|segmentation|polygon|keypoint|"
    r"(?<![a-z])(clip|frame|sound|voice|box|region|depth)(e?s)?(?![a-z])"
)
_AGAINST = re.compile(r"(?<![a-z])(ignore[sd]?|skip(ped)?|exclude[sd]?|discard(ed)?|drop(ped)?|masked)(?![a-z])")
"""Matches names of switches that say something when they are on."""
_LEARNING = re.compile(
    r"(?<![a-z])(loss(es)?|weights?|train(able|ing)?|learn(t|ed|able)?|mask(s|ed)?|labels?|rejected|chosen|"
    r"prefer(red|ence)?|kto|dpo|supervis(e|ed|ion)|(in)?correct|(un)?desirable)(?![a-z])|" + _AGAINST.pattern
)
_NUMBER = re.compile(r"[-+]?\d*\.?\d+(e[-+]?\d+)?")
_DEEP, _MANY = 4, 1000  # of a value that is looked through for names of media
_NEAR = 0.82
_NAMES = {place: frozenset(name for names in read for name in names) for place, read in READ.items()}


def check_fields(place: Place, found: Mapping[str, Any], unread: set[str], said: str = "") -> None:
    """Look at the names of a record, a message or a part; those that are passed over are added to ``unread``.

    ``said``: how a message calls it, for instance ``message 2``.
    """
    if _NAMES[place].issuperset(found):
        return
    for name, value in found.items():
        if name in _NAMES[place] or _is_empty(value):
            continue
        plain, refused, is_note, near = _meaning(place, name)
        if problem := refused or (None if is_note else _suspicion(plain, value) or near):
            raise ValueError(
                f"{f'{said} has' if said else 'it has'} {clipped(repr(name), 60)}, {shown(value)}: {problem}"
            )
        if not is_note:
            unread.add(name if place == "record" else f"{place}.{name}")


def column_problem(name: str, value: Any) -> str | None:
    """Return why a cell of a table that nothing reads may not be passed over; None where it may."""
    plain, refused, _, _ = _meaning("record", name)
    switch = plain in (*SWITCHES, *LABELS) and not _is_on(value)
    if switch or (_AGAINST.search(plain) and str(value).strip().lower() in ("true", "1", "1.0", "yes")):
        return (
            "a bad answer, or one that is weighed or not learnt, is not trained from a table; drop the line, or the "
            "column"
        )
    return None if plain in _NAMES["record"] else refused


def _is_on(value: Any) -> bool:
    """Return whether a cell says that a line is learnt; a class's name is a note."""
    if isinstance(value, str):
        word = value.strip().lower()
        return word in ("true", "1", "1.0") or (word != "false" and not _NUMBER.fullmatch(word))
    return isinstance(value, bool | int | float) and value == 1


def read_switch(found: Mapping[str, Any], said: str) -> bool | None:
    """Return whether a message is to be learnt, by its own ``SWITCHES``; None where it has none."""
    values = {name: switched(name, found[name], said) for name in SWITCHES if found.get(name) is not None}
    if len(set(values.values())) > 1:
        raise ValueError(f"{said} has {' and '.join(values)}, which contradict each other; keep one")
    return next(iter(values.values()), None)


def switched(name: str, value: Any, said: str) -> bool:
    """Return one switch as a truth."""
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise ValueError(
        f"{said} has {name} {shown(value)}; true or 1 (learnt) and false or 0 (read only) are obeyed, weights in "
        "between and switches of single tokens are not: write one of them, or drop the record"
    )


@lru_cache(maxsize=10_000)
def _meaning(place: Place, name: str) -> tuple[str, str | None, bool, str | None]:
    """Return a name in plain letters, why it is refused, whether it is a note, and what to say if it is nearly read."""
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip()).lower().replace(" ", "_").replace("-", "_")
    if plain in _NAMES[place]:
        return plain, f"write it {plain!r}", False, None
    for places, patterns, words in REFUSED:
        if place in places and any(fnmatchcase(plain, pattern) for pattern in patterns.split()):
            return plain, words, False, None
    near = get_close_matches(plain, sorted(_NAMES[place]), 1, _NEAR)
    return plain, None, bool(_NOTE.search(plain)), f"nothing reads it; did you mean {near[0]!r}?" if near else None


def _suspicion(plain: str, value: Any) -> str | None:
    """Return why a name that means nothing known looks like a switch or a medium; None where it does not."""
    if _AGAINST.search(plain) and value in (False, 0):
        return None
    if _LEARNING.search(plain) and (not isinstance(value, str) or value.strip().lower() in ("true", "false")):
        return "it may say what is learnt, and nothing reads it; rename it to metadata, or drop it"
    is_scalar = isinstance(value, bool | int | float)
    return _ELSEWHERE if (_MEDIUM.search(plain) and not is_scalar) or _names_media(value) else None


def _is_empty(value: Any, deep: int = 2 * _DEEP) -> bool:
    if isinstance(value, dict | list):
        return deep > 0 and all(_is_empty(x, deep - 1) for x in (value.values() if isinstance(value, dict) else value))
    return value is None or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null"))


def _names_media(value: Any) -> bool:
    """Say whether a value is, or holds, the name of a picture, a video or a sound, or its bytes."""
    level = [value]
    for _ in range(_DEEP):
        if any(isinstance(each, str) and _is_medium(each) for each in level):
            return True
        groups = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [below for group in groups for below in group][:_MANY]
    return False


def _is_medium(text: str) -> bool:
    inline = text.startswith(("data:image", "data:video", "data:audio"))
    return inline or text[-8:].lower().rstrip().endswith(MEDIA_SUFFIXES)
