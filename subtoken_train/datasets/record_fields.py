"""Declares every field of a record that somebody's trainer reads, and what becomes of it here.

A field that changes what is learnt, or what is seen, is obeyed or refused by name; notes about a record are left alone;
a name that nobody declared is refused where it looks like a medium or a mask, and reported by ``check`` otherwise. The
page ``docs/data_fields.md`` is made from the same declaration. An empty value (null, "", [], {}) says nothing: tables
that were stored by columns have one for every column.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from subtoken_train.datasets.text_media import MEDIA_SUFFIXES
from subtoken_train.errors import clipped
from subtoken_train.typed import shown

Place = Literal["record", "message", "part"]
Fate = Literal["read", "obeyed", "refused", "left out"]


@dataclass(frozen=True)
class Fields:
    """Fields of one meaning.

    Attributes:
        names: as they are written.
        place: what has them: a record, a message of it, or a part of a message's content.
        fate: what becomes of them.
        whose: formats that write them.
        words: what happens, as a clause that ends a message.
    """

    names: tuple[str, ...]
    place: Place
    fate: Fate
    whose: str
    words: str


def _named(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SWITCHES = _named("loss trainable train training weight loss_weight loss_mask loss_scale supervise supervised")
"""Switches that say whether a message is learnt: true or 1, false or 0."""
_SWITCHES = frozenset(SWITCHES)
LABELS = _named("label kto_tag is_correct")
"""Switches that say whether the answer is a good one."""
_TOOLS = "tools are not trained; drop the record, or its tools"
_SOUND = "sound is not read; drop the record"
_BOXES = "places in a picture are not read; write them into the texts, or drop the record"
_TOKENS = "switches of single tokens are not obeyed; give a message loss: true or false"
_PAIRS = "preferences are not trained; write the answer to learn as the last message, and drop the rest"
_FRAME = "it changes the chat format, which is the backbone's own here; drop it"
_ELSEWHERE = "it is not read; name pictures in image or images, videos in video or videos"
_SIZES = "it changes what is seen and is not obeyed (data.max_image_pixels and backbone.max_pixels are); drop it"
_REASONS = "it is not part of the answer here; write it into the answer, or drop it"

FIELDS = (
    Fields(("id",), "record", "read", "all", "names the record in messages"),
    Fields(_named("conversations messages"), "record", "read", "LLaVA, ShareGPT; OpenAI, trl", "the messages"),
    Fields(_named("system system_prompt"), "record", "read", "LLaMA-Factory, ms-swift", "before the first question"),
    Fields(_named("image images"), "record", "read", "LLaVA, Qwen-VL, InternVL; LLaMA-Factory, ms-swift, verl, trl",
           "a path, or a list of paths"),
    Fields(_named("video videos fps"), "record", "read", "LLaVA-NeXT, Qwen-VL; LLaMA-Factory, ms-swift, verl",
           "folders or lists of frames; `video` is one, `videos` a list of them"),
    Fields(("kind",), "record", "read", "this project", "scores by kind"),
    Fields(LABELS, "record", "obeyed", "trl, ms-swift, LLaMA-Factory (KTO)",
           "`true`: the answer is learnt as any other; `false`, or anything else, is refused"),
    Fields(SWITCHES, "record", "obeyed", "verl and others",
           "true or 1 says nothing; a list has one switch for each message; all else is refused"),
    Fields(_named("chosen rejected chosen_response rejected_response chosen_messages rejected_messages rejected_images "
                  "rejected_videos rejected_audios rejected_tools preferred_output non_preferred_output margin "
                  "positive_messages negative_messages"),
           "record", "refused", "trl, LLaMA-Factory, ms-swift, OpenAI (DPO, rewards, embeddings)", _PAIRS),
    Fields(_named("tools functions function_call tool_calls tool_choice"), "record", "refused",
           "OpenAI, LLaMA-Factory, ms-swift, verl", _TOOLS),
    Fields(_named("audio audios audio_path audio_url speech"), "record", "refused", "LLaMA-Factory, ms-swift", _SOUND),
    Fields(_named("objects ref bbox bboxes box boxes gt_bbox region regions mask masks segmentation segmentations "
                  "points polygons keypoints"),
           "record", "refused", "ms-swift; ViP-LLaVA and other forks of LLaVA", _BOXES),
    Fields(_named("labels input_ids token_ids attention_mask position_ids assistant_masks assistant_mask "
                  "completion_mask response_mask prompt_mask loss_masks train_detail"),
           "record", "refused", "trl, verl, axolotl (tokenised)", _TOKENS),
    Fields(_named("mask_history train_on_inputs train_on_prompt"), "record", "refused", "LLaMA-Factory, axolotl",
           "say it message by message, with loss: true or false"),
    Fields(_named("enable_thinking chat_template chat_template_kwargs add_generation_prompt continue_final_message"),
           "record", "refused", "verl, trl", _FRAME),
    Fields(("documents",), "record", "refused", "trl, transformers",
           "it is put into the prompt there and not here; write it into the question"),
    Fields(("history",), "record", "refused", "LLaMA-Factory, ms-swift (Alpaca)",
           "earlier turns are not read from it; write them as messages"),
    Fields(_named("img image_path image_paths image_file image_files image_url image_urls pixel_values video_path "
                  "video_url video_file frames frame_folder data_path image_folder image_dir video_dir"),
           "record", "refused", "Qwen-VL and many others", _ELSEWHERE),
    Fields(_named("video_start video_end start_time end_time min_pixels max_pixels resized_height resized_width"),
           "record", "refused", "Qwen-VL", _SIZES),
    Fields(_named("uid uuid idx index question_id image_id image_ids video_id qid sample_id conversation_id conv_id "
                  "group_id ann_id data_id source sources dataset data_source dataset_name origin split subset "
                  "category categories task task_type type topic domain subject language lang url urls source_url "
                  "coco_url "
                  "flickr_url license licence author annotator date timestamp created_at version model model_name "
                  "generator difficulty level quality score scores rating tags tag comment comments note notes title "
                  "width height width_list height_list image_size num_images num_turns length num_tokens token_count "
                  "duration hash md5 sha256 channel ability parallel_tool_calls"),
           "record", "left out", "LLaVA, InternVL, ms-swift, OpenAI and others", "notes about the record"),
    Fields(_named("from role value content"), "message", "read", "all", "who says it, and what"),
    Fields(SWITCHES, "message", "obeyed", "ms-swift, axolotl, OpenAI (`weight`), verl",
           "false or 0: the message is read and not learnt; anything between is refused"),
    Fields(_named("train_detail training_detail loss_masks token_weights"), "message", "refused", "axolotl", _TOKENS),
    Fields(_named("tool_calls function_call tool_call_id tools"), "message", "refused", "OpenAI, axolotl, trl", _TOOLS),
    Fields(_named("reasoning_content reasoning thinking refusal"), "message", "refused", "OpenAI, trl, axolotl",
           _REASONS),
    Fields(("prefix",), "message", "refused", "Mistral", _FRAME),
    Fields(_named("audio audios"), "message", "refused", "OpenAI, trl", _SOUND),
    Fields(_named("image images video videos"), "message", "refused", "trl, Ollama",
           "name pictures beside the messages (image, images, video, videos) or in parts of the content"),
    Fields(_named("objects bbox bboxes box boxes region masks"), "message", "refused", "forks of LLaVA", _BOXES),
    Fields(_named("id name timestamp time create_time created_at date model lang language tokens num_tokens "
                  "token_count author turn index idx end_turn"),
           "message", "left out", "OpenAI, ShareGPT", "notes about the message"),
    Fields(_named("type text image_url image path url"), "part", "read", "OpenAI, transformers", "a text or an image"),
    Fields(_named("min_pixels max_pixels resized_height resized_width"), "part", "refused", "Qwen-VL", _SIZES),
    Fields(("detail",), "part", "left out", "OpenAI", "pictures are seen as the backbone sees them"),
    Fields(_named("index order"), "part", "left out", "exports of chats", "parts out of its order are refused"),
)  # fmt: skip
"""All that is declared."""

_NOTE = re.compile(r"_(ids?|sizes?|width|height|source|hash|md5|type|format|count|num)$|^(num|n)_")
"""Matches names of notes about a medium, not of the medium."""
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


def check_fields(place: Place, found: Mapping[str, Any], unread: set[str], said: str = "") -> None:
    """Look at the names of a record, a message or a part; names that say nothing known are added to ``unread``.

    Args:
        place: what it is.
        found: its fields.
        unread: gets the names that are read by nobody; those of messages and parts with their place before them.
        said: how a message calls it, for instance ``message 2``.
    """
    if _usual(place).issuperset(found):
        return
    table = _table(place)
    for name, value in found.items():
        if _is_empty(value):
            continue
        field = table.get(name)
        problem = None if field is None else field.words if field.fate == "refused" else ""
        if field is None:
            problem = _suspicion(name, value, table)
            if problem is None:
                unread.add(name if place == "record" else f"{place}.{name}")
        if problem:
            before = f"{said} has " if said else "it has "
            raise ValueError(f"{before}{clipped(repr(name), 60)}, {shown(value)}: {problem}")


def fields_of(place: Place, fate: Fate) -> frozenset[str]:
    """Return the declared names of one place and fate."""
    return frozenset(name for fields in FIELDS if (fields.place, fields.fate) == (place, fate) for name in fields.names)


def refused_column(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the first of some columns of a table that is declared and refused, and why; None where there is none."""
    table = _table("record")
    for name in names:
        field = table.get(_plain(name))
        if field is not None and field.fate == "refused":
            return name, field.words
    return None


def is_off(name: str, value: Any) -> bool:
    """Return whether a cell of a column says that a line is weighed, bad or not learnt; a class's name is a note."""
    plain = _plain(name)
    if plain in (*SWITCHES, *LABELS):
        return not _is_on(value)
    return bool(_AGAINST.search(plain)) and str(value).strip().lower() in ("true", "1", "1.0", "yes")


def _is_on(value: Any) -> bool:
    if isinstance(value, str):
        word = value.strip().lower()
        return word in ("true", "1", "1.0") or (word not in ("false",) and not _NUMBER.fullmatch(word))
    return isinstance(value, bool | int | float) and value == 1


def read_switch(found: Mapping[str, Any], said: str) -> bool | None:
    """Return whether a message is to be learnt, by its own ``SWITCHES``; None where it has none."""
    if _SWITCHES.isdisjoint(found):
        return None
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


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_is_empty, value.values() if isinstance(value, dict) else value))
    return value is None or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null"))


def _suspicion(name: str, value: Any, table: Mapping[str, Fields]) -> str | None:
    """Return why an undeclared field may not be passed over; None where it may."""
    plain = _plain(name)
    if plain != name and plain in table:
        field = table[plain]
        return field.words if field.fate == "refused" else None if field.fate == "left out" else f"write it {plain!r}"
    is_note = isinstance(value, bool | int | float)
    if _AGAINST.search(plain) and value in (False, 0):
        return None
    if _LEARNING.search(plain) and (not isinstance(value, str) or value.strip().lower() in ("true", "false")):
        return "it may say what is learnt, and nothing reads it; rename it to metadata, or drop it"
    if (_MEDIUM.search(plain) and not _NOTE.search(plain) and not is_note) or _names_media(value):
        return _ELSEWHERE
    return None


def _names_media(value: Any) -> bool:
    """Say whether a value is, or holds, the name of a picture, a video or a sound, or its bytes."""
    level = [value]
    for _ in range(_DEEP):
        if any(_is_medium(each) for each in level):
            return True
        level = [
            below
            for each in level
            if isinstance(each, dict | list)
            for below in (each.values() if isinstance(each, dict) else each)
        ][:_MANY]
    return False


def _is_medium(value: Any) -> bool:
    return isinstance(value, str) and (
        value.startswith(("data:image", "data:video", "data:audio"))
        or value[-8:].lower().rstrip().endswith(MEDIA_SUFFIXES)
    )


@cache
def _table(place: Place) -> dict[str, Fields]:
    return {name: fields for fields in FIELDS if fields.place == place for name in fields.names}


@cache
def _usual(place: Place) -> frozenset[str]:
    """Return the names that need no look: with nothing else there is nothing to refuse."""
    return frozenset().union(*(fields_of(place, fate) for fate in ("read", "obeyed", "left out")))


def _plain(name: str) -> str:
    """Return a name in small letters, its words joined as Python's are."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip()).lower().replace(" ", "_").replace("-", "_")
