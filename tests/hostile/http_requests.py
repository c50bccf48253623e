"""What reaches the port of ``serve``, good and bad: a second client is answered meanwhile and afterwards, as ever."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.model import SubTokenModel
from tests.hostile.case import Case, Expect, Place
from tests.hostile.chat_requests import BROKEN, WRONG, body
from tests.hostile.references import made
from tests.support.chat_servers import Served, serving_model

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
TYPE = {"content-type": "application/json"}
HEADERS: tuple[dict[str, str], ...] = (
    {"content-type": "text/plain"}, {"host": "evil.example"}, {"content-type": "json"},
)  # fmt: skip
RAW = (
    b"", b"\r\n\r\n", b"GET", b"\x16\x03\x01\x02\x00\x01\x00", b"\xff" * 4000, b"GET / HTTP/9.9\r\n\r\n",
    HEAD + b"a: b\r\n" * 20_000, HEAD + b"content-length: 90\r\n\r\n{",
    HEAD + b"content-length: -1\r\n\r\n{}", HEAD + b"content-length: " + b"9" * 30 + b"\r\n\r\n{}",
    HEAD + b"x-long: " + b"x" * 200_000 + b"\r\n\r\n",
    HEAD + b"transfer-encoding: gzip\r\n\r\n{}", HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
)  # fmt: skip
PATHS = ("/", "/v1", "/v1/chat/completions/../../health", "/v2/chat/completions", "/%00", "/\\", "/docs")
LONG = (" " * 200_000, "a" * 200_000, "\n" * 200_000, "\u0301" * 50_000, "<s>" * 20_000, "a b " * 40_000)


@cache
def model(pool: Path) -> tuple[SubTokenModel, ArmSpec]:
    """The model of the server, loaded once."""
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
    """The second client's answer, as the library gives it."""
    return str(model(pool)[0].chat(body()["messages"], max_new_tokens=8))


def answer(served: Served, asked: Any, **headers: str) -> str:
    """The text of the answer to a body."""
    content = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    return text_of(
        httpx2.post(f"{served.url}/v1/chat/completions", content=content, headers={**TYPE, **headers}, timeout=8)
    )


def text_of(reply: httpx2.Response) -> str:
    """See ``answer``."""
    if reply.status_code == 200:
        return str(reply.json()["choices"][0]["message"]["content"])
    if 400 <= reply.status_code < 500:
        error = reply.json()["error"] if "json" in reply.headers.get("content-type", "") else {"message": reply.text}
        raise ValueError(f"HTTP {reply.status_code}: {error['message']}")
    raise RuntimeError(f"HTTP {reply.status_code}: {reply.text[:300]}")


def raw(served: Served, content: bytes, good: bool = False) -> None:
    """Send bytes, hear what comes first, hang up."""
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


def make(draw: random.Random, place: Place) -> Case:
    """A request with one thing wrong in it, bytes that are none, or one that is long or good."""
    kind = draw.choice(("value", "bytes", "headers", "raw", "path", "long", "good", "gone"))
    asked, expect, headers = body(), Expect.REFUSED, dict[str, str]()
    if kind == "raw":
        content = draw.choice(RAW)
        return Case(f"raw: {content[:60]!r}", lambda: beside(place.pool, lambda served: raw(served, content)), expect)
    if kind == "path":
        path = draw.choice(PATHS)
        act = lambda served: text_of(httpx2.get(f"{served.url}{path}", timeout=8))  # noqa: E731
        return Case(f"path: {path!r}", lambda: beside(place.pool, act), expect)
    if kind == "gone":
        whole = json.dumps({**asked, "stream": True, "max_tokens": 64}).encode()
        content = HEAD + b"content-length: %d\r\n\r\n" % len(whole) + whole
        act = lambda served: raw(served, content, good=True)  # noqa: E731
        return Case("gone: in the middle of its answer", lambda: beside(place.pool, act), expect)
    what: Any = ""
    if kind == "value":
        key = draw.choice(list(WRONG))
        what = asked[key] = draw.choice(WRONG[key])
    elif kind == "bytes":
        asked = what = draw.choice(BROKEN)
    elif kind == "headers":
        headers = what = draw.choice(HEADERS)
    elif kind == "long":
        what = draw.choice(LONG)
        asked["messages"] = [{"role": "user", "content": what}]
    else:
        expect = Expect.TAKEN
    reference = made(lambda: alone(place.pool)) if expect is Expect.TAKEN else None
    return Case(
        f"{kind}: {what!r}"[:90],
        lambda: beside(place.pool, lambda served: answer(served, asked, **headers)),
        expect,
        reference=reference,
    )
