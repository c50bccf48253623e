"""A body of ``POST /v1/chat/completions`` or ``/v1/completions``, read; the server's page is made from these tables.

Null is as if left out; what changes nothing is ignored; what is obeyed is read; the rest is refused by name. All up to
a part with ``"cache_control": {"type": "ephemeral"}`` is the *context*, compressed once and kept.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote_to_bytes

from subtoken_train.datasets.image_sources import EncodedImage, open_image
from subtoken_train.documents import check_file_name, parse_json
from subtoken_train.errors import COLD, MAX_SEED, check_range, refuse, unknown_name
from subtoken_train.families.chat_template import Message
from subtoken_train.families.images import Picture
from subtoken_train.families.literal_marks import IMAGE_MARK, VIDEO_MARK
from subtoken_train.inference.prompt_inputs import read_messages
from subtoken_train.typed import shown, typed

MAX_STOPS, MAX_STOP = 4, 200
DEFAULT_TEXT = 16  # tokens of a text's continuation, unless it says more: as OpenAI's
_MARK = {"type": "ephemeral"}
IGNORED = (
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "store", "service_tier",
    "reasoning_effort", "verbosity", "prediction", "parallel_tool_calls", "priority", "request_id",
    "include_reasoning", "separate_reasoning",
)  # fmt: skip
"""Names that ask for no other answer here, whatever they say."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "min_tokens", "top_logprobs"), (0,)),
    **dict.fromkeys(("logprobs", "ignore_eos", "use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("echo", "return_token_ids"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(("stop_token_ids", "bad_words", "tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("suffix", "cache_salt"), ("",)),
    **{"top_k": (-1, 0), "logit_bias": ({},), "response_format": ({"type": "text"},), "modalities": (["text"],)},
}  # fields that nothing here obeys: values without effect
OF_DRAWS = ("temperature", "top_k", "min_p", "typical_p")  # without effect on a greedy answer, whatever they say
OF_MESSAGES: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "function_call": (), "cache_control": ()}
"""Fields of a message that would change an answer; all others but role and content are ignored."""
OF_STREAMS: dict[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,)}


class RefusedError(ValueError):
    """A request that is refused: its status, and OpenAI's code where it has one."""

    def __init__(self, status: int, words: str, code: str | None = None) -> None:
        super().__init__(words)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Limits:
    """Bounds of one request; of how many run together (``batch``), and of the bytes that their caches take.

    ``max_pixels`` are width times height of each image; ``evictions`` may be named, and keep a share within ``keep``.
    """

    max_new_tokens: int = 512
    max_images: int = 4
    max_pixels: int = 25_000_000
    evictions: tuple[str, ...] = ()
    keep: tuple[float, float] = (0.0, 1.0)
    batch: int = 64
    memory: int = 4_000_000_000


@dataclass(frozen=True, kw_only=True)
class _Body:
    model: str
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] = field(default_factory=list)
    stream: bool = False
    stream_options: dict[str, bool | None] = field(default_factory=dict)
    eviction: str | None = None
    eviction_keep: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Chat(_Body):
    messages: list[Any]
    context: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


@dataclass(frozen=True, kw_only=True)
class _Text(_Body):
    prompt: str | list[str]


@dataclass(frozen=True)
class ContextQuestion:
    """The first question about a context, and later turns, the last one the user's.

    The context is a text or pictures, ``by_system`` what the system says; None: the saved one of that ``name``.
    """

    question: str
    followed: list[Message]
    context: str | list[EncodedImage] | None = None
    by_system: bool = False
    system: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ChatRequest:
    """One request; None of ``asked``: the whole prompt is compressed for this answer alone.

    ``settings`` are those of ``generate``; no ``max_new_tokens``: as many as there is room for; no ``eviction``: the
    server's. ``raw``: the one message is a text to go on with. ``owner``: whose contexts it may find, "": everybody's.
    """

    model: str
    messages: list[Message]
    images: list[EncodedImage]
    asked: ContextQuestion | None
    settings: dict[str, Any]
    seed: int | None
    max_new_tokens: int | None
    stops: list[str]
    stream: bool
    include_usage: bool
    eviction: str | None
    eviction_keep: float | None
    template: dict[str, Any] = field(default_factory=dict)
    raw: bool = False
    owner: str = ""

    @property
    def goes_on(self) -> bool:
        """Return whether the answer goes on with what stands last, and may begin with a space."""
        return self.raw or self.messages[-1]["role"] == "assistant"

    def pictures(self, limits: Limits) -> list[Picture]:
        """Decode the images, each once its header says that it is no larger than allowed."""
        return [open_image(each, max_pixels=limits.max_pixels) for each in self.images]


def read_request(body: bytes, limits: Limits, raw: bool = False, marks: bool = False) -> ChatRequest:
    """Read a request, ``raw`` of ``/v1/completions``; ``marks``: the model takes ``<image>`` in a text for an image."""
    content = parse_json(body, "the body")
    read = typed(_Text if raw else _Chat, _obeyed(content) if isinstance(content, dict) else content, "the body")
    if not 0 <= read.temperature <= 2 or not 0 < read.top_p <= 1:
        raise ValueError("temperature must be 0 (greedy, as if left out) to 2, and top_p more than 0 and at most 1")
    check_range("seed", read.seed, 0, MAX_SEED)
    if more := read.stream_options.keys() - {"include_usage", "include_obfuscation", *OF_STREAMS}:
        raise ValueError(f"stream_options has {shown(min(more))}, which is not read; leave it out")
    _check_harmless(read.stream_options, OF_STREAMS, "stream_options: ")
    most = read.max_tokens if read.max_completion_tokens is None else read.max_completion_tokens
    most = DEFAULT_TEXT if raw and most is None else most
    check_range("max_tokens", most, 1)
    stops = [read.stop] if isinstance(read.stop, str) else read.stop
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP for stop in stops):
        raise ValueError(f"stop is at most {MAX_STOPS} texts of at most {MAX_STOP} characters")
    _check_eviction(read, limits)
    images: list[EncodedImage] = []
    if isinstance(read, _Chat):
        plain, mark = _plain_messages(read.messages, images, limits, marks)
        messages, _ = read_messages(plain)
        asked, template = _asked(plain, messages, mark, images, read.context), read.chat_template_kwargs
        if template and read.context is not None:
            raise ValueError("a saved context has its own chat_template_kwargs; leave them out")
        goes_on = messages[-1]["role"] == "assistant"
        if read.continue_final_message not in (None, goes_on) or (read.add_generation_prompt is False and not goes_on):
            words = "only a last message of the assistant can be continued"
            raise ValueError(f"{words}; leave continue_final_message and add_generation_prompt out")
    else:
        assert isinstance(read, _Text)
        texts = [read.prompt] if isinstance(read.prompt, str) else read.prompt
        refuse((len(texts) != 1, f"prompt has {len(texts)} texts; send one, and a request for each other"))
        (messages, _), asked, template = read_messages(texts[0]), None, {}
    samples = {"temperature": read.temperature, "top_p": read.top_p, "top_k": 0} if read.temperature else {}
    settings: dict[str, Any] = {"do_sample": bool(samples), **samples}
    most = None if most is None else min(most, limits.max_new_tokens)
    asks = read.seed, most, stops, read.stream, bool(read.stream_options.get("include_usage"))
    evicts = read.eviction, read.eviction_keep
    return ChatRequest(read.model, messages, images, asked, settings, *asks, *evicts, template, raw)


def _check_eviction(read: _Body, limits: Limits) -> None:
    name, keep, (low, high) = read.eviction, read.eviction_keep, limits.keep
    if name is not None and name not in limits.evictions:
        refuse((not limits.evictions, f"eviction {shown(name)}: requests choose none here; leave it out"))
        raise unknown_name("eviction of this server", name, limits.evictions)
    if keep is not None and not (limits.evictions and low <= keep <= high):
        allowed = f"{low:g} to {high:g}" if limits.evictions else "nothing: requests do not choose it here"
        raise ValueError(f"eviction_keep is {keep:g}; allowed is {allowed}")


def _plain_messages(
    given: Sequence[Any], images: list[EncodedImage], limits: Limits, marks: bool
) -> tuple[list[dict[str, Any]], tuple[int, int] | None]:
    """Return messages without OpenAI's dress, and where the last mark of a context stands; images are added."""
    made, mark = [], None
    for number, message in enumerate(given):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {number + 1} is {shown(message)}; it must be a group of keys")
        _check_harmless(message, OF_MESSAGES, f"message {number + 1}: ")
        content = message.get("content")
        if isinstance(content, list):
            for place, part in enumerate(content):
                lasts = part.get("cache_control") if isinstance(part, Mapping) else None
                said = {name: lasts[name] for name in lasts if name != "ttl"} if isinstance(lasts, Mapping) else lasts
                refuse((said not in (None, _MARK), f"cache_control is {shown(lasts)}; it must be {_MARK}"))
                mark = mark if lasts is None else (number, place)
            content = [_plain_part(part, number, images, limits, marks) for part in content]
        elif isinstance(content, str):
            content = _as_text(content, marks)
        role = "system" if message.get("role") == "developer" else message.get("role")
        made.append({"role": role, "content": content})
    return made, mark


def _as_text(text: str, marks: bool) -> str:
    for mark in (IMAGE_MARK, VIDEO_MARK) if marks else ():
        text = text.replace(mark, f"\\{mark}")
    return text


def _plain_part(part: Any, number: int, images: list[EncodedImage], limits: Limits, marks: bool) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_url":
        images.append(_image(part.get("image_url"), len(images), limits))
        return {"type": "image"}
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": _as_text(part["text"], marks)}
    raise ValueError(f"message {number + 1} has a part {shown(part)}; parts are text or image_url")


def _image(given: Any, place: int, limits: Limits) -> EncodedImage:
    """Return the encoded image of a data URL; nothing is fetched."""
    name = f"{place + 1} of the request"
    if place >= limits.max_images:
        raise RefusedError(413, f"a request has {limits.max_images} images at most here; send fewer")
    url = given.get("url") if isinstance(given, Mapping) else None
    scheme, _, rest = url.partition(":") if isinstance(url, str) else ("", "", "")
    head, comma, data = rest.partition(",")
    if scheme.lower() != "data" or not comma:
        raise ValueError(f"image {name} is not a data URL (data:image/png;base64,...); the server downloads no images")
    content = unquote_to_bytes(data)
    if head.lower().endswith(";base64"):  # else the bytes themselves
        packed = b"".join(content.split()).rstrip(b"=")
        try:
            content = base64.b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
        except ValueError:
            raise ValueError(f"image {name} is not base64; write data:image/png;base64,...") from None
    return EncodedImage(partial(bytes, content), name)


def _asked(
    plain: Sequence[dict[str, Any]],
    messages: Sequence[Message],
    mark: tuple[int, int] | None,
    images: list[EncodedImage],
    name: str | None,
) -> ContextQuestion | None:
    """Return the question and its context; None where the request marks and names none."""
    if name is None and mark is None:
        return None
    told = messages[0]["role"] == "system"
    first = int(told)
    early = messages[first]["role"] != "user"
    refuse((early, "the first question about a context is the user's; let a user's message follow it"))
    if name is not None:
        check_file_name(name, "context")
        beside = mark is not None or told or images
        refuse((beside, "a saved context has its own system prompt and pictures; send questions alone with it"))
        return ContextQuestion(messages[0]["content"], list(messages[1:]), name=name)
    assert mark is not None
    system = messages[0]["content"] if told else None
    if told and mark[0] == 0:
        late = mark[1] + 1 < len(plain[0]["content"]) or images
        refuse((late, "cache_control in a system message belongs to its last part, and goes with no picture"))
        return ContextQuestion(messages[1]["content"], list(messages[2:]), system, by_system=True)
    elsewhere = "cache_control belongs to the system message or to the user's first; leave it out elsewhere"
    refuse((mark[0] != first, elsewhere))
    parts = plain[first]["content"]
    before, rest = parts[: mark[1] + 1], parts[mark[1] + 1 :]
    seen = [part for part in before if part["type"] == "image"]
    mixed = len(seen) not in (0, len(before)) or len(seen) != len(images)
    refuse(
        (not rest, "nothing asks after the part with cache_control; put the question into a part behind it"),
        (mixed, "a context is texts alone, or all pictures of the request before any text; move cache_control"),
    )
    context = list(images) if seen else "\n".join(part["text"] for part in before)
    question = "\n".join(part["text"] for part in rest)
    return ContextQuestion(question, list(messages[first + 1 :]), context, system=system)


def _check_harmless(content: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], place: str = "") -> None:
    for name, value in content.items():
        harmless = [(isinstance(each, bool), each) for each in neutral.get(name, ())]
        if name in neutral and value is not None and (isinstance(value, bool), value) not in harmless:
            raise ValueError(f"{place}{name} {shown(value)} is not served here; leave it out")


def _obeyed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request that are left to read; another one that would change the answer is refused."""
    asked = {name: value for name, value in content.items() if value is not None and name not in IGNORED}
    heat = asked.get("temperature", 0)
    if type(heat) in (int, float) and 0 <= heat <= COLD:
        asked = {name: value for name, value in asked.items() if name not in OF_DRAWS}
    _check_harmless(asked, NEUTRAL)
    return {name: value for name, value in asked.items() if name not in NEUTRAL}
