"""What clients of ``serve`` send: bodies with one thing wrong in them, and what OpenAI's write beside the point."""

from __future__ import annotations

import base64
import copy
import json
import random
from typing import Any

from tests.hostile.case import Case, Expect, Place
from tests.hostile.decoding import pixels, right_picture
from tests.hostile.pictures import SUFFIXES, spoilt
from tests.hostile.references import made

PIXELS = 10**6
"""Of a picture that is taken."""
MARK = {"cache_control": {"type": "ephemeral"}}
TEXT = {"type": "text", "text": "A text."}
WRONG: dict[str, tuple[Any, ...]] = {
    "model": (1, [], {}, True),
    "messages": (
        "x", 1, {}, [], [1], [[]], [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}],
        [{"role": "assistant", "content": "x"}], [{"role": "user", "content": 1}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "x", "tool_calls": [1]}], [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], [{"role": "user", "content": "x", **MARK}],
        [{"role": "user", "content": [{"type": "audio", "data": "x"}]}], [{"role": "user", "content": [{"text": "x"}]}],
        [{"role": "user", "content": [{**TEXT, **MARK}]}],
        [{"role": "user", "content": [{**TEXT, "cache_control": 1}, TEXT]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, TEXT]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,@"}, TEXT]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": 1}, TEXT]}],
    ),
    "max_tokens": (0, -1, 1.5, "1", True, [], 10**30),
    "max_completion_tokens": (0, "x", -(10**9)),
    "temperature": (-1, 3, "hot", [], True, 1e400),
    "top_p": (0, -1, 2, "x"),
    "seed": (-1, 1.5, 2**70, "x"),
    "stop": (1, {}, [1], ["a"] * 5, "x" * 201, [["a"]]),
    "stream": ("yes", 1, []),
    "stream_options": ("x", [1], {"x": 1}),
    "eviction": ("snapkv", "", 1, "os.system", "\x00"),
    "eviction_keep": (0, 2, -1, "x", True),
    "context": ("../x", "", 1, "a/b", "\x00", "."),
    "n": (2, 0, "x", True),
    "repetition_penalty": (1.2, "x"),
    "best_of": (3,),
    "chat_template_kwargs": (1, [], "x"),
    "continue_final_message": (True, 1, "x"),
    "tools": ([{"type": "function"}], "x", {"a": 1}),
    "response_format": ({"type": "json_object"}, "x"),
    "logprobs": (True, 3),
    "logit_bias": ({"1": 100}, "x"),
    "evction": ("none",),
    "__class__": (1,),
    "": (1,),
}  # fmt: skip
BESIDE: dict[str, tuple[Any, ...]] = {
    "user": ("me", 1),
    "metadata": ({"a": "b"},),
    "reasoning_effort": ("high",),
    "store": (True, False),
    "repetition_penalty": (1.0, 1),
    "top_k": (-1, 0, 50),
    "best_of": (1,),
    "messages": (
        [{"role": "user", "content": "What?", "name": "me", "tool_calls": [], "annotations": [], "x": 1}],
        [{"role": "user", "content": [{"type": "text", "text": "What?", "annotations": []}], "refusal": None}],
    ),
    "n": (1, None),
    "tools": ([], None),
    "logit_bias": ({}, None),
    "response_format": ({"type": "text"},),
    "seed": (None,),
    "stop": (None, []),
    "max_tokens": (8, None),
    "temperature": (0, 0.0, None),
}
"""What changes nothing, where the answer has as many tokens as asked for."""
BROKEN = (
    b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"\x00", b"[" * 20_000, b'{"a":' * 20_000,
    b'{"model": "m", "model": "m", "messages": []}', b'{"max_tokens": ' + b"9" * 6000 + b"}",
    b'{"temperature": NaN}', b'{"temperature": Infinity}', b"{} {}",
)  # fmt: skip


def body() -> dict[str, Any]:
    """A request with nothing wrong in it."""
    return {"model": "m", "messages": [{"role": "user", "content": "What?"}], "max_tokens": 8}


def read(content: bytes) -> tuple[dict[str, Any], list[Any]]:
    """What the server takes of a body, and its pictures."""
    from subtoken_train.serving.chat_request import Limits, read_request

    limits = Limits(max_new_tokens=64, max_images=2, max_pixels=PIXELS, evictions=("knorm", "none"), keep=(0.1, 0.8))
    request = read_request(content, limits)
    return {**vars(request), "max_new_tokens": request.max_new_tokens or 8}, request.pictures(limits)


def make(draw: random.Random, place: Place) -> Case:
    """A body with one thing wrong in it, or a thing that changes nothing."""
    kind = draw.choice(("value", "value", "value", "bytes", "beside", "picture"))
    asked, expect = body(), Expect.REFUSED
    if kind == "bytes":
        content = draw.choice((*BROKEN, json.dumps(asked).encode()[: -draw.randrange(1, 40)]))
        return Case(f"a body: {content[:30]!r}", lambda: read(content), expect)
    if kind == "picture":
        return picture(draw, place)
    odd = WRONG if kind == "value" else BESIDE
    key = draw.choice(list(odd))
    asked[key] = copy.deepcopy(draw.choice(odd[key]))
    if key == "eviction_keep" and kind == "value":
        asked["eviction"] = "knorm"
    content = json.dumps(asked).encode()
    if kind == "beside":
        return Case(f"a body: {key}", lambda: read(content), Expect.TAKEN, reference=made(lambda: read(plain())))
    return Case(f"a body: {key} {asked[key]!r}"[:120], lambda: read(content), expect)


def plain() -> bytes:
    """The request that means the same."""
    return json.dumps(body()).encode()


def picture(draw: random.Random, place: Place) -> Case:
    """A picture in base64, whole, damaged, or a bomb."""
    suffix = draw.choice(SUFFIXES)
    content, what = (place.pool / f"images/a.{suffix}").read_bytes(), "whole"
    form = draw.choice(("whole", "damaged", "bomb"))
    if form != "whole":
        content, what = spoilt(draw, content, form)
    url = f"data:image/{suffix};base64,{base64.b64encode(content).decode()}"
    shown = {"type": "image_url", "image_url": {"url": url}}
    asked = json.dumps({**body(), "messages": [{"role": "user", "content": [shown, TEXT]}]}).encode()
    right = right_picture(content)
    expect = Expect.REFUSED if right is None or right.width * right.height > PIXELS else Expect.TAKEN
    return Case(f"a picture: {what}", lambda: read(asked)[1][0], expect, reference=pixels(right))
