r"""LLaVA's instruction format: a record, its pictures and turns, and what can be wrong with one.

A record is ``{"id": ..., "image": "a.jpg" | ["a.jpg", ...], "kind": ..., "conversations": [{"from": "human", "value":
"<image>\n..."}, {"from": "gpt", "value": "..."}, ...]}``; ``image`` and ``kind`` may be absent. What gpt says before
the first human turn is left out, and so is a last human turn that nobody answers, as in LLaVA's training. Videos:
``"video"`` is a folder of frames or a list of their files (several: a list of such lists), ``"videos"`` a list of
either, ``"fps"`` their frames a second. ``<video>`` marks each, or ``<image>`` in a record without images.

No text may train without its picture in silence, and no field that changes what is learnt is passed over: the page
``docs/data_fields.md``, made from these tables, has the rules. A question may not name a file of the images' folder.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from subtoken_train.datasets.image_sources import PICTURE_SUFFIXES, VIDEO_SUFFIXES, refuse_video_file
from subtoken_train.errors import clipped, refuse
from subtoken_train.families import literal_marks as marks
from subtoken_train.families.literal_marks import IMAGE_MARK, VIDEO_MARK, picture_marks
from subtoken_train.typed import shown

IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER = IMAGE_MARK, VIDEO_MARK
_ROW = (
    'it has no turns; write {"id": ..., "image": ..., "conversations": [{"from": "human", "value": ...}, {"from": '
    '"gpt", "value": ...}]}, or make records of a table: subtoken-train init FOLDER'
)
_ROWS = {
    "text": "it is a plain text, which a language model reads: data.train: {name: FILE}",
    "chosen": "preferences are not trained; write the chosen answer as the last of conversations",
}
_ESCAPE = f" (where it is text, write \\{IMAGE_PLACEHOLDER})"


def record_id(row: Any, index: int) -> str:
    """Return the record's own id as text, or its place in the file."""
    return str(row.get("id", index) if isinstance(row, dict) else index)


def image_names(row: dict[str, Any]) -> list[str]:
    """Return its images; none for a text-only record."""
    images = row.get("image") or []
    return [images] if isinstance(images, str) else images


def video_names(row: dict[str, Any]) -> list[str | list[str]]:
    """Return its videos, each the name of a folder or of its frames."""
    if many := row.get("videos"):
        return [many] if isinstance(many, str) else many
    videos = row.get("video") or []
    several = isinstance(videos, list) and any(isinstance(video, list) for video in videos)
    return videos if several or not videos else [videos]


def has_media(row: dict[str, Any]) -> bool:
    """Return whether a record names images or videos."""
    return bool(image_names(row) or video_names(row))


def pictures_marked(row: dict[str, Any]) -> list[bool]:
    """Tell for each placeholder of its prompts, in order, whether a video stands there."""
    videos, images = video_names(row), image_names(row)
    found = [mark for turn in used_turns(row)[::2] for mark in picture_marks(turn["value"])]
    return [mark == VIDEO_PLACEHOLDER or not images for mark in found if videos or mark == IMAGE_PLACEHOLDER]


def without_placeholders(row: dict[str, Any], text: str) -> str:
    """Return a text of a record without marks of pictures, as a reader sees it."""
    if not marks.has_marks(text):
        return text.strip()
    return marks.unescaped(marks.with_marks(text, "", "" if video_names(row) else VIDEO_PLACEHOLDER)).strip()


def answer_is_learnt(turn: dict[str, Any]) -> bool:
    """Return whether the loss is on a turn of gpt."""
    return turn.get("loss", True) is not False


def used_turns(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return its turns from the first one of human to the last one of gpt; a system's before them is none."""
    roles = [message.get("from") for message in row["conversations"]]
    start = next((place for place, role in enumerate(roles) if role not in ("gpt", "system")), len(roles))
    turns: list[dict[str, Any]] = row["conversations"][start:]
    return turns[:-1] if len(turns) % 2 and turns[-1].get("from") == "human" else turns


def said_turns(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return its used turns, behind a system's where it has one of its own."""
    return [turn for turn in row["conversations"][:1] if turn["from"] == "system"] + used_turns(row)


def record_problem(row: Any, as_document: bool = False) -> str | None:
    """Return what is wrong with a record in LLaVA's form and what to do about it; ``as_document``: marks are text."""
    if not isinstance(row, dict) or not isinstance(row.get("conversations"), list) or not row["conversations"]:
        return next((words for name, words in _ROWS.items() if isinstance(row, dict) and name in row), _ROW)
    return next(_problems(row, as_document), None)


def _problems(row: dict[str, Any], as_document: bool) -> Iterator[str]:
    """Yield what is wrong; what follows a problem may rest on what it speaks of."""
    yield from _field_problems(row)
    messages = row["conversations"]
    if not all(isinstance(m, dict) and isinstance(m.get("value"), str) for m in messages):
        yield 'a turn is not {"from": ..., "value": text}'
    used, pictures = used_turns(row), has_media(row)
    if not used or [message.get("from") for message in used] != ["human", "gpt"] * (len(used) // 2):
        roles = ", ".join(str(message.get("from")) for message in messages)
        yield f"turns come from {roles}; they must alternate human, gpt and end with gpt"
    if not any(map(answer_is_learnt, used[1::2])):
        yield "none of its answers is trained on (loss, trainable, train or weight is off); drop the record"
    if as_document and pictures:
        yield "it has images, which a language model does not read; name it in data.train_file"
    if problem := media_problem(said_turns(row), pictures, as_document):
        yield problem
    if not as_document:
        yield from _mark_problems(row)


def _field_problems(row: dict[str, Any]) -> Iterator[str]:
    name = row.get("id")
    if not isinstance(name, str | int | float | None) or isinstance(name, bool) or name != name:  # noqa: PLR0124
        yield f"id is {shown(name)}; a text or a number is needed"
    if not isinstance(row.get("kind"), str | None):
        yield f"kind is {shown(row['kind'])}; a text is needed"
    names = image_names(row)
    if not isinstance(names, list) or not all(isinstance(name, str) and "\0" not in name for name in names):
        yield f"image is {shown(row['image'])}; a path or a list of paths is needed"
    if not row.get("video") and not row.get("videos"):
        return
    if row.get("video") and row.get("videos"):
        yield "videos are named in video and in videos; name them in one of them"
    key = "videos" if row.get("videos") else "video"
    for video in video_names(row) if isinstance(row[key], str | list) else [5]:
        frames = [video] if isinstance(video, str) else video
        listed = frames if isinstance(frames, list) else []
        if not listed or not all(isinstance(name, str) and name and "\0" not in name for name in listed):
            yield f"{key} is {shown(row[key])}; a folder of frames, or a list of their files, is needed"
        else:
            yield from filter(None, map(refuse_video_file, listed))
    fps = row.get("fps", 1.0)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps < math.inf:
        yield f"fps is {shown(fps)}; a number of frames a second above 0 is needed"


def _mark_problems(row: dict[str, Any]) -> Iterator[str]:
    answers = [mark for turn in used_turns(row)[1::2] for mark in picture_marks(turn["value"])]
    marked, images, videos = pictures_marked(row), len(image_names(row)), len(video_names(row))
    if videos and answers:
        yield f"a gpt turn holds {IMAGE_PLACEHOLDER} or {VIDEO_PLACEHOLDER}; pictures belong in human turns{_ESCAPE}"
    if IMAGE_PLACEHOLDER in answers:
        yield f"a gpt turn holds {IMAGE_PLACEHOLDER}; images belong in human turns{_ESCAPE}"
    if (marked.count(False) if videos else len(marked), marked.count(True) if videos else 0) == (images, videos):
        return
    if videos:
        found = f"{marked.count(False)} placeholder(s) of images and {marked.count(True)} of videos"
        each = f"write {VIDEO_PLACEHOLDER} once per video and {IMAGE_PLACEHOLDER} once per image in the human turns"
        yield f"{found} for {images} image(s) and {videos} video(s); {each}"
    what = f"{images} image(s); write exactly one per image in the human turns"
    nothing = f"image; add the image's path or remove the placeholder{_ESCAPE}"
    yield f"{len(marked)} {IMAGE_PLACEHOLDER} " + (f"for {what}" if images else f"but no {nothing}")


_MEDIA_SUFFIXES = (
    *(*PICTURE_SUFFIXES, ".heic", ".heif", ".svg", *VIDEO_SUFFIXES),
    *(".wav", ".mp3", ".flac", ".ogg", ".m4a", ".aac", ".opus"),
)
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
    rf"<(?:(?:start|begin|end)_of_|fake_token_around_|unk_){_KIND}>|<im_(?:start|end|patch)>|"
    r"(?-i:\[(?:IMG|IMG_BREAK|IMG_END|AUDIO|BEGIN_AUDIO)\])(?!https?:)|"  # other spellings are no tokens of Mistral's
    r"data:(?:image|video|audio)/[\w.+-]{1,40};base64,[\w+/]{64}",  # a whole medium; code that speaks of one has none
    re.I,
)
_NUMBERED = re.compile(rf"<{_KIND}[ _-]?\d{{1,4}}>", re.I)  # a picture's name where the picture has a mark beside it
_NAMED = rf"(?:[a-z]{{1,20}}_)?{_KIND}"
_BARE = re.compile(
    rf"(?:(?:<!--|__|[<\[{{(]{{1,2}})\s?/?{_NAMED}[ _-]?\d{{0,4}}\s?/?(?:-->|__|[>\])}}]{{1,2}})\s?)+", re.I
)

_GLUED = re.compile(rf"^<{_NAMED}>(?=[a-z])|(?<=[.?!])<{_NAMED}>$", re.I)  # prose about HTML puts a space there
_WORDS, _PARTS = re.compile(r"[^\s<>()\[\]{}\"'`|=,;]+"), re.compile(r"(?<=[(\[{\"'`|])[^<>()\[\]{}\"'`|\n]+")
_INSTEAD = f"name it in image, images, video or videos, and write {IMAGE_MARK} or {VIDEO_MARK} at its place"


def media_problem(turns: Iterable[dict[str, Any]], pictured: bool, as_document: bool) -> str | None:
    """Return what to say where a text holds a spelling that only media have; ``as_document``: placeholders are text."""
    for turn in turns:
        text = turn["value"]
        tokens = (found[0] for found in _TOKEN.finditer(text)) if "<" in text or "[" in text or "data:" in text else ()
        spelt = [*_tagged(text), *(token for token in tokens if not (pictured and _NUMBERED.fullmatch(token)))]
        if not spelt and not pictured and turn["from"] == "human":
            for mark in (IMAGE_MARK, VIDEO_MARK) if as_document else (IMAGE_MARK,):
                text = text.replace(mark, "")
            first, *rest = text.strip().split("\n")
            spelt = [line.strip() for line in (first, *rest[-1:]) if _BARE.fullmatch(line.strip())]
            spelt += [found[0] for found in _GLUED.finditer(text.strip()) if "</" not in text]
        if spelt:
            return f"a text holds {shown(spelt[0])}, a medium that nothing would read; {_INSTEAD}, or drop the record"
    return None


def files_named(row: dict[str, Any]) -> list[str]:
    """Return what its questions call files of media, for a record that names none in a field."""
    texts = [turn["value"] for turn in row["conversations"] if turn["from"] == "human" and not has_media(row)]
    words = (found[0] for text in texts if "." in text for each in (_WORDS, _PARTS) for found in each.finditer(text))
    names = dict.fromkeys(word.strip().rstrip(".:!?") for word in words)
    return [each for each in names if each[-8:].lower().endswith(_MEDIA_SUFFIXES) and not _PLACE.match(each)]


def refuse_files(names: Iterable[str], place: str, folder: Path) -> None:
    """Refuse texts that name a file which lies in a folder."""
    for name in names:
        if len(name) < 400 and "\0" not in name and ".." not in name and (folder / name).is_file():
            words = f"{place}: a text names {shown(name)}, which is in {folder}, and no field does, so that nothing"
            raise ValueError(f"{words} would read it; {_INSTEAD}")


def _tagged(text: str) -> Iterator[str]:
    """Yield tags with a target inside: a path without spaces (of an image), a file of a medium, an address."""
    for found in _TAG.finditer(text) if "</" in text or "[/" in text else ():
        target, kind = found[2].strip(), found[1].lower()
        is_file = target.lower().partition("?")[0].endswith(_MEDIA_SUFFIXES)
        if target and ((kind in ("img", "image") and " " not in target) or is_file or _PLACE.match(target)):
            yield found[0]


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
_MEANT = {
    rf"^({'|'.join(SWITCHES)})$": "write it in a message: true (trained on) or false (only read)",
    r"labels|mask|weights|_ids": "single tokens cannot be switched; write loss: true or false in a message",
    r"tool|function": "tool calls are not trained; drop the record, or its tools",
    r"audio|speech|sound": "sound is not read; drop the record",
    r"box|region|polygon|point": "places in a picture are not read; write them into the texts, or drop the record",
    r"chosen|rejected|preferred": "preferences are not trained; write the answer to learn as the last message",
}  # says what to do about names that other trainers read
_NUMBER = re.compile(r"[-+]?\d*\.?\d+(e[-+]?\d+)?")
_NAMES = {place: frozenset(name for names in read for name in names) for place, read in READ.items()}


def check_fields(place: Place, found: Mapping[str, Any], said: str = "it") -> None:
    """Refuse names of a record, a message or a part that nobody reads; ``said``: its name, as ``message 2``."""
    for name in found:
        if name not in _NAMES[place] and not _NOTE.search(_plain(name)) and not _is_empty(found[name]):
            near = get_close_matches(_plain(name), sorted(_NAMES[place]), 1, 0.8)
            own = (words for names, words in _MEANT.items() if re.search(names, _plain(name)))
            meant = f"did you mean {near[0]!r}?" if near else next(own, "drop it, or put it into metadata")
            raise ValueError(f"{said} has {clipped(repr(name), 60)}, {shown(found[name])}: nothing reads it; {meant}")


def column_problem(name: str, value: Any) -> str | None:
    """Return why a cell of a table that nothing reads may not be passed over; None where it may."""
    plain, word = _plain(name), str(value).strip().lower()
    if plain in (*SWITCHES, *_LABELS):  # a class's name is a note
        named = isinstance(value, str) and word != "false" and not _NUMBER.fullmatch(word)
        off = not named and word not in ("true", "1", "1.0")
    else:
        off = bool(_CHANGING.match(plain)) and word not in ("false", "0", "0.0")
    return "it may change what is learnt, and nothing reads it; drop the line, or the column" if off else None


@lru_cache(maxsize=10_000)
def _plain(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[ -]", "_", name.strip()).lower()


def read_switch(found: Mapping[str, Any], said: str) -> bool | None:
    """Return whether a message is to be learnt, by its own ``SWITCHES``; None where it has none."""
    values = {name: found[name] for name in SWITCHES if found.get(name) is not None}
    for name, value in values.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(f"{said} has {name} {shown(value)}; true or 1 (learnt) and false or 0 (read) are obeyed")
    refuse((len(set(values.values())) > 1, f"{said} has {' and '.join(values)}, which contradict each other; keep one"))
    return next(map(bool, values.values()), None)


def _is_empty(value: Any, deep: int = 8) -> bool:
    if isinstance(value, dict | list):
        return deep > 0 and all(_is_empty(x, deep - 1) for x in (value.values() if isinstance(value, dict) else value))
    return value is None or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null"))
