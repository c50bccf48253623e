"""What clients of ``serve`` and visitors of ``demo`` send: bodies, bytes, uploads, with a second client beside them."""

from __future__ import annotations

import base64
import copy
import json
import random
import socket
import sys
import threading
import types
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.model import SubTokenModel
from tests.hostile.case import VLM, Case, Expect, Place
from tests.hostile.pictures import SUFFIXES, encoded, of_mode, pixels, right_picture, spoilt, turned
from tests.hostile.references import made
from tests.hostile.values import no_file
from tests.support.chat_servers import Served, serving_model

PIXELS = 10**6  # of a picture that is taken
MARK = {"cache_control": {"type": "ephemeral"}}
TEXT = {"type": "text", "text": "A text."}


def user(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


WRONG: dict[str, tuple[Any, ...]] = {
    "model": (1, [], {}, True),
    "messages": (
        "x", 1, {}, [], [1], [[]], [{}], [{"role": "user"}], [{"role": "tool", "content": "x"}],
        [{"role": "assistant", "content": "x"}], [{"role": ["user"], "content": "x"}], user(1), user("\ud800"),
        user("x", tool_calls=[1]), user("x", **MARK), user([{"type": ["text"], "text": "x"}]),
        user([{"type": "audio", "data": "x"}]), user([{"text": "x"}]), user([{**TEXT, **MARK}]),
        user([{**TEXT, "cache_control": 1}, TEXT]), user([image({"url": "http://127.0.0.1/a.png"}), TEXT]),
        user([image("data:image/png;base64,@"), TEXT]), user([image(1), TEXT]),
    ),
    "max_tokens": (0, -1, 1.5, "1", True, [], 10**30), "max_completion_tokens": (0, "x", -(10**9)),
    "temperature": (-1, 3, "hot", [], True, 1e400), "top_p": (0, -1, 2, "x"), "seed": (-1, 1.5, 2**70, "x"),
    "stop": (1, {}, [1], ["a"] * 5, "x" * 201, [["a"]]), "stream": ("yes", 1, []),
    "stream_options": ("x", [1], {"x": 1}), "eviction": ("snapkv", "", 1, "os.system", "\x00"),
    "eviction_keep": (0, 2, -1, "x", True), "context": ("../x", "", 1, "a/b", "\x00", "."), "n": (2, 0, "x", True),
    "repetition_penalty": (1.2, "x"), "best_of": (3,), "chat_template_kwargs": (1, [], "x"),
    "continue_final_message": (True, 1, "x"), "tools": ([{"type": "function"}], "x", {"a": 1}),
    "response_format": ({"type": "json_object"}, "x"), "logprobs": (True, 3), "logit_bias": ({"1": 100}, "x"),
    "evction": ("none",), "__class__": (1,), "": (1,),
}  # fmt: skip
BESIDE: dict[str, tuple[Any, ...]] = {  # what changes nothing, where the answer has as many tokens as asked for
    "user": ("me", 1), "metadata": ({"a": "b"},), "reasoning_effort": ("high",), "store": (True, False),
    "repetition_penalty": (1.0, 1), "top_k": (-1, 0, 50), "best_of": (1,),
    "messages": (
        user("What?", name="me", tool_calls=[], annotations=[], x=1),
        user([{"type": "text", "text": "What?", "annotations": []}], refusal=None),
    ),
    "n": (1, None), "tools": ([], None), "logit_bias": ({}, None), "response_format": ({"type": "text"},),
    "seed": (None,), "stop": (None, []), "max_tokens": (8, None), "temperature": (0, 0.0, None),
}  # fmt: skip
BROKEN = (
    b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b"\x00", b"[" * 20_000, b'{"a":' * 20_000,
    b'{"model": "m", "model": "m", "messages": []}', b'{"max_tokens": ' + b"9" * 6000 + b"}",
    b'{"temperature": NaN}', b'{"temperature": Infinity}', b"{} {}",
)  # fmt: skip


def body() -> dict[str, Any]:
    return {"model": "m", "messages": user("What?"), "max_tokens": 8}


def read(content: bytes) -> tuple[dict[str, Any], list[Any]]:
    from subtoken_train.serving.chat_request import Limits, read_request

    limits = Limits(max_new_tokens=64, max_images=2, max_pixels=PIXELS, evictions=("knorm", "none"), keep=(0.1, 0.8))
    request = read_request(content, limits)
    return {**vars(request), "max_new_tokens": request.max_new_tokens or 8}, request.pictures(limits)


def chat(draw: random.Random, place: Place) -> Case:
    kind = draw.choice(("value", "value", "value", "bytes", "beside", "picture"))
    asked, plain = body(), json.dumps(body()).encode()
    if kind == "bytes":
        content = draw.choice((*BROKEN, plain[: -draw.randrange(1, 40)]))
        return Case(f"a body: {content[:30]!r}", lambda: read(content), Expect.REFUSED)
    if kind == "picture":
        return picture(draw, place)
    odd = WRONG if kind == "value" else BESIDE
    key = draw.choice(list(odd))
    asked[key] = copy.deepcopy(draw.choice(odd[key]))
    if key == "eviction_keep" and kind == "value":
        asked["eviction"] = "knorm"
    content = json.dumps(asked).encode()
    expect = Expect.TAKEN if kind == "beside" else Expect.REFUSED
    what = f"a body: {key} {asked[key]!r}"[:120]
    return Case(what, lambda: read(content), expect, reference=made(lambda: read(plain)))


def picture(draw: random.Random, place: Place) -> Case:
    suffix, form, what = draw.choice(SUFFIXES), draw.choice(("whole", "damaged", "bomb")), "whole"
    content = (place.pool / f"images/a.{suffix}").read_bytes()
    if form != "whole":
        content, what = spoilt(draw, content, form)
    shown = image({"url": f"data:image/{suffix};base64,{base64.b64encode(content).decode()}"})
    asked = json.dumps({**body(), "messages": user([shown, TEXT])}).encode()
    right = right_picture(content)
    expect = Expect.REFUSED if right is None or right.width * right.height > PIXELS else Expect.TAKEN
    return Case(f"a picture: {what}", lambda: read(asked)[1][0], expect, reference=pixels(right))


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HEADERS = ({"content-type": "text/plain"}, {"host": "evil.example"}, {"content-type": "json"})
RAW = (
    b"", b"\r\n\r\n", b"GET", b"\x16\x03\x01\x02\x00\x01\x00", b"\xff" * 4000, b"GET / HTTP/9.9\r\n\r\n",
    HEAD + b"a: b\r\n" * 20_000, HEAD + b"content-length: 90\r\n\r\n{", HEAD + b"content-length: -1\r\n\r\n{}",
    HEAD + b"content-length: " + b"9" * 30 + b"\r\n\r\n{}", HEAD + b"x-long: " + b"x" * 200_000 + b"\r\n\r\n",
    HEAD + b"transfer-encoding: gzip\r\n\r\n{}", HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
)  # fmt: skip
PATHS = ("/", "/v1", "/v1/chat/completions/../../health", "/v2/chat/completions", "/%00", "/\\", "/docs")
LONG = (" " * 200_000, "a" * 200_000, "\n" * 200_000, "\u0301" * 50_000, "<s>" * 20_000, "a b " * 40_000)


@cache
def model(pool: Path) -> tuple[SubTokenModel, ArmSpec]:
    spec = ArmSpec(backbone=str(pool / "backbones/tiny-llama"), eviction="knorm", eviction_keep=0.5)
    return spec.load("cpu"), spec


def beside(pool: Path, act: Callable[[Served], Any]) -> Any:
    """What comes of a client's act while another one asks, and asks again once it has its answer."""
    loaded, spec = model(pool)
    others: list[Any] = []
    with serving_model(spec, model=loaded, queue=4, max_body=2_000_000, timeout=10, name="m") as served:
        other = threading.Thread(target=lambda: others.append(answer(served, body())))
        other.start()
        try:
            return act(served)
        finally:
            other.join()
            others.append(answer(served, body()))
            if others != [alone(pool)] * 2 or served.health()["status"] != "ok":
                raise RuntimeError(f"the second client heard {others}, health says {served.health()}")


@cache
def alone(pool: Path) -> str:
    return str(model(pool)[0].chat(body()["messages"], max_new_tokens=8))


def answer(served: Served, asked: Any, **headers: str) -> str:
    content = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    headers = {"content-type": "application/json", **headers}
    return text_of(httpx2.post(f"{served.url}/v1/chat/completions", content=content, headers=headers, timeout=8))


def text_of(reply: httpx2.Response) -> str:
    if reply.status_code == 200:
        return str(reply.json()["choices"][0]["message"]["content"])
    if 400 <= reply.status_code < 500:
        error = reply.json()["error"] if "json" in reply.headers.get("content-type", "") else {"message": reply.text}
        raise ValueError(f"HTTP {reply.status_code}: {error['message']}")
    raise RuntimeError(f"HTTP {reply.status_code}: {reply.text[:300]}")


def raw(served: Served, content: bytes, good: bool = False) -> None:
    where = urlsplit(served.url)
    with socket.create_connection((where.hostname, where.port or 0), timeout=5 if good else 0.5) as connection:
        try:
            connection.sendall(content)
            said = connection.recv(4000)
        except (TimeoutError, ConnectionError):
            said = b""
    if said.startswith(b"HTTP/1.1 5") or said.startswith(b"HTTP/1.1 2") is not good:
        raise RuntimeError(f"{content[:80]!r} is answered by {said[:200]!r}")
    raise ValueError("the client has gone")


def http(draw: random.Random, place: Place) -> Case:
    kind = draw.choice(("value", "bytes", "headers", "raw", "path", "long", "good", "gone"))
    asked, headers = body(), dict[str, str]()
    act: Callable[[Served], Any] = lambda served: answer(served, asked, **headers)  # noqa: E731
    what: Any = ""
    if kind == "raw":
        what = draw.choice(RAW)
        act = lambda served: raw(served, what)  # noqa: E731
    elif kind == "path":
        what = draw.choice(PATHS)
        act = lambda served: text_of(httpx2.get(f"{served.url}{what}", timeout=8))  # noqa: E731
    elif kind == "gone":  # in the middle of its answer
        whole = json.dumps({**asked, "stream": True, "max_tokens": 64}).encode()
        content = HEAD + b"content-length: %d\r\n\r\n" % len(whole) + whole
        act = lambda served: raw(served, content, good=True)  # noqa: E731
    elif kind == "value":
        key = draw.choice(list(WRONG))
        what = asked[key] = draw.choice(WRONG[key])
    elif kind == "bytes":
        asked = what = draw.choice(BROKEN)
    elif kind == "headers":
        headers = what = draw.choice(HEADERS)
    elif kind == "long":
        what = draw.choice(LONG)
        asked["messages"] = user(what)
    expect = Expect.TAKEN if kind == "good" else Expect.REFUSED
    reference = made(lambda: alone(place.pool))
    return Case(f"{kind}: {what!r}"[:90], lambda: beside(place.pool, act), expect, reference=reference)


QUESTIONS = ("", " ", "\x00", "\ud800", "<image><image>")
KEEPS = ("", "0", "-1", "NaN", "inf", "1.5", "x", "5%", "0tokens", "-5tokens", "MB", "9" * 400)
EVICTIONS = ("nope", "snapkv ", "../x", "os.system", "ada(", "ada(nope)", "\x00")
HOSTS = ("nowhere.invalid", "::1", "", "999.1.1.1", "\x00", "x" * 300, "1.2.3.4", "-", "a b")


@cache
def page(pool: Path) -> tuple[Any, Any]:
    from subtoken_train.demo.side_by_side import SideBySide

    with pytest.MonkeyPatch.context() as patch:
        if find_spec("gradio") is None:
            patch.setitem(sys.modules, "gradio", types.SimpleNamespace(update=lambda **what: what))
        from subtoken_train.demo import blocks
    adapter = pool / "adapters" / VLM
    return SideBySide(str(adapter), f"{adapter}_anchor", device="cpu"), blocks._respond


def ask(pool: Path, picture: str | None, question: str, eviction: str | None, keep: str) -> list[str]:
    models, respond = page(pool)
    *_, last = respond(models, picture, question, eviction, keep, "model")
    sides = len(models.sides)
    if len(last[sides + 2]) < sides:
        raise ValueError(last[sides + 1]["value"])
    return [str(text) for text in last[:sides]]


def upload(draw: random.Random, place: Place, path: Path) -> tuple[bytes, str, bool]:
    form = draw.choice(("damaged", "bomb", "turned", "mode", "file"))
    content = (place.pool / f"images/a.{draw.choice(SUFFIXES)}").read_bytes()
    if form == "file":
        path.write_bytes(content)
        return content, no_file(draw, path), False
    if form in ("damaged", "bomb"):
        content, what = spoilt(draw, content, form)
    else:
        _, content, what = (turned if form == "turned" else of_mode)(draw)
    path.write_bytes(content)
    return content, what, right_picture(content) is not None


def demo(draw: random.Random, place: Place) -> Case:
    kind = draw.choice(("upload", "upload", "upload", "question", "keep", "eviction", "none", "host", "whole"))
    if kind == "host":
        from subtoken_train.demo.local_server import check_address

        host = draw.choice(HOSTS)
        return Case(f"an address {host[:30]!r}", lambda: check_address(host, 7860), Expect.REFUSED)
    content, question, eviction, keep = (place.pool / "images/a.png").read_bytes(), "what ?", None, "0.5"
    path, what, right = place.write("upload.png", content), kind, kind == "whole"
    if kind == "upload":
        content, what, right = upload(draw, place, path)
    elif kind == "question":
        question = draw.choice(QUESTIONS)
    elif kind == "keep":
        eviction, keep = "snapkv", draw.choice(KEEPS)
    elif kind == "eviction":
        eviction = draw.choice(EVICTIONS)
    elif kind == "whole":
        eviction = draw.choice((None, "knorm", "ada(snapkv)"))
    given = None if kind == "none" else str(path)

    def plain() -> list[str]:
        known = right_picture(content)
        assert known is not None
        other = place.root / "plain.png"
        other.write_bytes(encoded(known))
        return ask(place.pool, str(other), question, eviction, keep)

    told = f"the page: {what} {question[:20]!r} {eviction!r} {keep[:20]!r}"
    expect = Expect.TAKEN if right else Expect.REFUSED
    return Case(told, lambda: ask(place.pool, given, question, eviction, keep), expect, reference=made(plain))
