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
    with pytest.raises(ValueError, match="temperature is False; it must be a number"):
        read(temperature=False)
    with pytest.raises(ValueError, match=r"include_usage.* is 1; it must be true or false"):
        read(stream=True, stream_options={"include_usage": 1})
    with pytest.raises(ValueError, match="top_k 50 is not served here"):
        read(top_k=50, temperature=0.5)
    with pytest.raises(ValueError, match=r"unknown key 'evction'\. Did you mean 'eviction'\?"):
        read(evction="none")


def test_a_message_may_say_more_than_is_read():
    beside = {"name": "me", "tool_calls": [], "annotations": [], "refusal": None, "audio": None, "x": {"y": 1}}
    part = text_part("What?", annotations=[], index=3)
    for message in ({"content": "What?", **beside}, {"content": [part], **beside}):
        assert read(messages=[{"role": "user", **message}]) == read()
    for name in OF_MESSAGES:
        with pytest.raises(ValueError, match=f"message 1: {name} .* is not served here"):
            read(messages=[{"role": "user", "content": "What?", name: [1]}])
    marked = {"role": "user", "content": "What?", **MARK}
    with pytest.raises(ValueError, match="message 1: cache_control"):
        read(messages=[marked])


def test_more_tokens_than_there_may_be_are_as_many_as_there_may_be():
    assert read(max_tokens=10**9).max_new_tokens == read(max_completion_tokens=65).max_new_tokens == 64
    assert (read(max_tokens=3).max_new_tokens, read().max_new_tokens) == (3, None)
    for most in (0, -1):
        with pytest.raises(ValueError, match=f"max_tokens is {most}; it must be 1 or more"):
            read(max_tokens=most)


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


@pytest.mark.parametrize("url", ["", "data:", "data:image/png;base64", "image/png;base64,AAAA", "file:///a,b", 3])
def test_what_is_no_data_url_is_refused(url):
    with pytest.raises(ValueError, match="image 1 of the request is no data URL"):
        read(messages=[{"role": "user", "content": [image_part(url), text_part("What?")]}])


@pytest.mark.parametrize("kind", [["text"], {"text": 1}, None, 1, "image", "video", "input_audio"])
def test_a_part_is_a_text_or_a_picture(kind):
    with pytest.raises(ValueError, match=r"message 1 has a part .*; parts are text or image_url"):
        read(messages=[{"role": "user", "content": [{"type": kind, "text": "x"}]}])


def test_marks_of_pictures_are_text():
    said = r"<image> \<image> \\<video>"
    for content in (said, [text_part(said)]):
        asked = read(marks=True, messages=[{"role": "user", "content": content}])
        assert asked.messages[0]["content"] == r"\<image> \\<image> \\\<video>"
        assert read(messages=[{"role": "user", "content": content}]).messages[0]["content"] == said


def test_a_text_to_go_on_with():
    asked = read(raw=True)
    assert (asked.messages[0]["content"], asked.raw, asked.max_new_tokens) == ("What?", True, 16)
    assert read(raw=True, prompt=["What?"], max_tokens=99) == read(raw=True, max_tokens=64)
    for prompt, words in (([], "prompt has 0 texts"), (["a", "b"], "prompt has 2 texts"), ([1], "prompt")):
        with pytest.raises(ValueError, match=words):
            read(raw=True, prompt=prompt)
    with pytest.raises(ValueError, match="unknown key 'messages'"):
        read(raw=True, messages=[])
