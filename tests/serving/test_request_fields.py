"""What becomes of each field of a request: one rule, and the values that change nothing."""

from __future__ import annotations

import base64
import io
import json
from urllib.parse import quote_from_bytes

import pytest
from PIL import Image

from subtoken_train.serving.chat_request import IGNORED, NEUTRAL, OF_MESSAGES, Limits, read_request
from tests.support.chat_servers import MARK, image_part, text_part

LIMITS = Limits(max_new_tokens=64)
SHOWN = io.BytesIO()
Image.new("RGB", (4, 3), "red").save(SHOWN, "PNG")
PNG = SHOWN.getvalue()
PACKED = base64.b64encode(PNG).decode()


def read(raw=False, marks=False, **more):
    asked = {"prompt": "What?"} if raw else {"messages": [{"role": "user", "content": "What?"}]}
    return read_request(json.dumps({"model": "m", **asked, **more}).encode(), LIMITS, raw, marks)


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_field_passes_where_it_changes_nothing_and_is_refused_where_it_would(name):
    for value in (*NEUTRAL[name], None):
        assert read(**{name: value}) == read()
        assert read(raw=True, **{name: value}) == read(raw=True)
    with pytest.raises(ValueError, match=f"{name} .* is not served here; leave it out"):
        read(**{name: {"other": 3}}, temperature=1)


@pytest.mark.parametrize("name", IGNORED)
def test_a_field_that_asks_for_nothing_passes(name):
    for value in ("high", True, False, {"a": "b"}, [1]):
        assert read(**{name: value}) == read()


def test_numbers_are_no_truths_and_draws_need_a_temperature():
    assert read(repetition_penalty=1.0, top_k=-1.0) == read()
    for name, value in (("n", True), ("logprobs", 0), ("frequency_penalty", False)):
        with pytest.raises(ValueError, match="is not served here"):
            read(**{name: value})
    for cold in (0, -0.0, 1e-300, 1e-5):
        assert read(top_k=50, min_p=0.1, temperature=cold) == read()
    assert read(temperature=1e-4).settings["temperature"] == 1e-4
    assert read(max_tokens=10**9).max_new_tokens == read(max_completion_tokens=65).max_new_tokens == 64
    assert (read(max_tokens=3).max_new_tokens, read().max_new_tokens) == (3, None)


def test_a_message_may_say_more_than_is_read():
    beside = {"name": "me", "tool_calls": [], "annotations": [], "refusal": None, "audio": None, "x": {"y": 1}}
    part = text_part("What?", annotations=[], index=3)
    for message in ({"content": "What?", **beside}, {"content": [part], **beside}):
        assert read(messages=[{"role": "user", **message}]) == read()
    for name in OF_MESSAGES:
        with pytest.raises(ValueError, match=f"message 1: {name} .* is not served here"):
            read(messages=[{"role": "user", "content": "What?", name: [1]}])


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{PACKED}",
        f"DATA:IMAGE/PNG;BASE64,{PACKED}",
        f"data:;base64,{PACKED}",
        f"data:image/png;name=a.png;charset=utf-8;base64,{PACKED}",
        f"data:application/octet-stream;base64,{PACKED.rstrip('=')}",
        "data:image/png;base64," + "\r\n".join(PACKED[at : at + 20] for at in range(0, len(PACKED), 20)),
        f"data:image/png;base64,{quote_from_bytes(PACKED.encode(), safe='')}",
        f"data:image/png,{quote_from_bytes(PNG)}",
        f"data:,{quote_from_bytes(PNG, safe='')}",
    ],
)
def test_a_data_url_is_read_in_every_form(url):
    part = image_part(url)
    part["image_url"] |= {"detail": "high", "format": "png"}
    (image,) = read(messages=[{"role": "user", "content": [part, text_part("What?")]}]).pictures(LIMITS)
    assert (image.size, image.getpixel((0, 0))) == ((4, 3), (255, 0, 0))


def test_a_text_to_go_on_with_and_marks_of_pictures_that_are_text():
    asked = read(raw=True)
    assert (asked.messages[0]["content"], asked.raw, asked.max_new_tokens) == ("What?", True, 16)
    assert read(raw=True, prompt=["What?"], max_tokens=99) == read(raw=True, max_tokens=64)
    said = r"<image> \<image> \\<video>"
    for content in (said, [text_part(said)]):
        marked, plain = (read(marks=on, messages=[{"role": "user", "content": content}]) for on in (True, False))
        assert marked.messages[0]["content"] == r"\<image> \\<image> \\\<video>"
        assert plain.messages[0]["content"] == said


def seen(part):
    return {"messages": [{"role": "user", "content": [part, text_part("What?")]}]}


NO_URL, NO_PART = "image 1 of the request is no data URL", "message 1 has a part .*; parts are text or image_url"
REFUSED = {
    **{f"url {url}": (seen(image_part(url)), NO_URL) for url in ("", "data:", "data:a;base64", "file:///a,b", 3)},
    **{f"part {kind}": (seen({"type": kind, "text": "x"}), NO_PART) for kind in (["text"], None, "image", "video")},
    "tokens": ({"max_tokens": 0}, "max_tokens is 0; it must be 1 or more"),
    "truth": ({"temperature": False}, "temperature is False; it must be a number"),
    "option": ({"stream_options": {"include_usage": 1}}, "include_usage.* is 1; it must be true or false"),
    "draws": ({"top_k": 50, "temperature": 0.5}, "top_k 50 is not served here"),
    "key": ({"evction": "none"}, r"unknown key 'evction'\. Did you mean 'eviction'\?"),
    "cache_control": ({"messages": [{"role": "user", "content": "x", **MARK}]}, "message 1: cache_control"),
    "no text": ({"raw": True, "prompt": []}, "prompt has 0 texts"),
    "texts": ({"raw": True, "prompt": ["a", "b"]}, "prompt has 2 texts"),
    "number": ({"raw": True, "prompt": [1]}, "prompt"),
    "messages": ({"raw": True, "messages": []}, "unknown key 'messages'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_request_is_refused(name):
    fields, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        read(**fields)
