"""What programs hand to ``SubTokenModel``, clients send to ``serve`` and visitors to ``demo``, others asking too."""

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
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from subtoken_train.inference.arm_spec import ArmSpec
from subtoken_train.inference.model import SubTokenModel
from tests.hostile.case import VLM, Case, Expect, Place, made
from tests.hostile.grammar import NAN, no_file
from tests.hostile.pictures import of_mode, pixels, right_picture, spoilt, turned
from tests.support.chat_servers import Served, serving_model
from tests.support.run_folders import encoded

COUNT = (0, -1, 1.5, "x")
REFUSED: dict[str, tuple[Any, ...]] = {
    "max_new_tokens": (*COUNT, NAN), "num_beams": COUNT, "temperature": (-1.0, NAN, "x"),
    "guidance_scale": (2.0, 7.5), "context_length": (-1, 1.5, "x", 10**6),
    "position_ids": (torch.arange(6)[None], torch.arange(6)[None] + 5), "assistant_model": ("x",),
    "unknown_setting": (1,), "num_return_sequences": (0, -1, 2), "cache_implementation": ("static", "nope"),
}  # fmt: skip
TAKEN = ({"max_new_tokens": 3}, {"num_beams": 3}, {"repetition_penalty": 1.5}, {"bad_words_ids": [[20]]})
"""What is taken gives transformers' own tokens, as the last two of the ids and three of the masks do."""
IDS = {
    "one dimension": lambda ids: ids[0], "three dimensions": lambda ids: ids[None], "no rows": lambda ids: ids[:0],
    "no columns": lambda ids: ids[:, :0], "floats": lambda ids: ids.float(), "booleans": lambda ids: ids.bool(),
    "negative": lambda ids: -ids, "beyond the vocabulary": lambda ids: ids + 10**6,
    "a list": lambda ids: ids.tolist(), "nothing": lambda ids: None, "a text": lambda ids: "what ?",
    "as they were": lambda ids: ids, "one token": lambda ids: ids[:, :1],
}  # fmt: skip
MASKS = {
    "all zeros": torch.zeros_like, "one row": lambda mask: mask[0], "too short": lambda mask: mask[:, :-1],
    "too long": lambda mask: torch.cat([mask, mask], 1), "too many rows": lambda mask: torch.cat([mask, mask]),
    "four dimensions": lambda mask: mask[:, None, None], "twos": lambda mask: mask * 2,
    "NaN": lambda mask: mask * NAN, "a list": lambda mask: mask.tolist(), "of floats": lambda mask: mask.float(),
    "of booleans": lambda mask: mask.bool(),
    "a pad before": lambda mask: torch.cat([mask[:, :1] * 0, mask[:, 1:]], 1),
}  # fmt: skip
RIGHT = ("as they were", "one token", "of floats", "of booleans", "a pad before")
GOOD = {"max_new_tokens": 1, "do_sample": False}


@cache
def loaded(folder: Path) -> Any:
    from subtoken_train.inference.model import SubTokenModel

    return SubTokenModel.from_pretrained(folder)


@cache
def theirs(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


ONE = torch.zeros(1, 3, 96, 96)
PIXELS_OF = {
    "zeros": ONE, "no numbers": torch.full_like(ONE, NAN), "one dimension less": ONE[0], "a text": "x",
    "too small": torch.zeros(1, 1, 4, 4),
}  # fmt: skip


def changed_call(draw: random.Random, good: dict[str, Any], vision: bool) -> tuple[dict[str, Any], str, bool]:
    """The arguments of a call with one of them changed, what was done, and whether it is right."""
    kind = "pixels" if vision else draw.choice(("settings", "ids", "masks"))
    if kind == "settings":
        name = draw.choice((*REFUSED, *range(len(TAKEN))))
        settings = TAKEN[name] if isinstance(name, int) else {name: draw.choice(REFUSED[name])}
        return {**good, **settings, "do_sample": name == "temperature"}, f"{settings}", isinstance(name, int)
    if kind == "pixels":  # without a placeholder
        what = draw.choice(list(PIXELS_OF))
        return {**good, "pixel_values": PIXELS_OF[what]}, f"pixels {what}", False
    what = draw.choice(list(IDS if kind == "ids" else MASKS))
    if kind == "masks":
        return {**good, "attention_mask": MASKS[what](good["attention_mask"])}, what, what in RIGHT
    ids = IDS[what](good["input_ids"])
    like = what in ("no columns", "no rows", "one token")
    mask = torch.ones_like(ids) if like else good["attention_mask"]
    return {**good, "input_ids": ids, "attention_mask": mask}, what, what in RIGHT


def calls(draw: random.Random, place: Place) -> Case:
    vision, ids = draw.random() < 0.25, torch.tensor([[5, 6, 7, 8, 9, 10]])
    folder = place.pool / ("adapters" if vision else "backbones") / (VLM if vision else "tiny-llama")
    here = loaded(folder)
    if vision and draw.random() < 0.4:
        images = draw.choice((["x"], [None], [5], "x"))
        return Case(f"inputs: images {images!r}", lambda: here.inputs("<image> what ?", images), Expect.REFUSED)
    good: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **GOOD}
    asked, what, right = changed_call(draw, good, vision)

    def call() -> Any:
        before = here.generate(**good)
        try:
            return here.generate(**asked)
        finally:
            assert torch.equal(here.generate(**good), before), "the object answers otherwise than before"

    def plain() -> Any:
        return theirs(folder).generate(**{**asked, "attention_mask": torch.as_tensor(asked["attention_mask"]).long()})

    return Case(f"generate: {what}", call, Expect.TAKEN if right else Expect.REFUSED, reference=made(plain))


LENGTHS = (1, 2, 63, 64, 65, 255, 256, 257, 700, 1024, 1025, 1500)
TEXTS = (
    "<image>", "<image><image>", "</s>", "<s>", "[INST]", "x " * 40, "\N{GRINNING FACE}", "a\nb",
    "\ufeffwhat ?", "{{7*7}}", "<video>", "=1+1", "e\u0301", "\u00e9", "what " * 300,
)  # fmt: skip
NO_PROMPT = ("", " ", "\u202e", "\u200b", "\n\n", "\ud800", "what \ud800 ?")
SHORT = {"max_new_tokens": 3, "do_sample": False}


def prompts(draw: random.Random, place: Place) -> Case:
    """A text or so many tokens, to which transformers answers as well, or nothing that could be answered."""
    folder = place.pool / "backbones/tiny-llama"
    ours, kind = loaded(folder), draw.choice(("length", "length", "text", "text", "refused"))
    text = draw.choice(NO_PROMPT if kind == "refused" else TEXTS)
    if kind == "refused":
        return Case(f"prompt {text!r}", lambda: ours.generate(**ours.inputs(text), **SHORT), Expect.REFUSED)
    ids = torch.tensor([[draw.randrange(5, 1280) for _ in range(draw.choice(LENGTHS))]])
    if kind == "text":
        ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def call() -> Any:
        return ours.generate(**(inputs if kind == "length" else ours.inputs(text)), **SHORT)

    what = f"{ids.shape[1]} tokens" if kind == "length" else repr(text[:40])
    return Case(
        f"prompt {what}", call, Expect.TAKEN, reference=made(lambda: theirs(folder).generate(**inputs, **SHORT))
    )


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
    suffix, content, what = spoilt(draw, place.pool)
    if draw.random() < 0.3:
        content, what = (place.pool / f"images/a.{suffix}").read_bytes(), "whole"
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
    kind, asked = draw.choice(("value", "bytes", "headers", "raw", "path", "long", "good", "gone")), body()
    key, content = draw.choice(list(WRONG)), draw.choice(BROKEN)
    wrong, headers, path, text = draw.choice(WRONG[key]), draw.choice(HEADERS), draw.choice(PATHS), draw.choice(LONG)
    streamed = json.dumps({**asked, "stream": True, "max_tokens": 64}).encode()
    streamed = HEAD + b"content-length: %d\r\n\r\n" % len(streamed) + streamed
    sent = draw.choice(RAW)
    acts: dict[str, tuple[Any, Callable[[Served], Any]]] = {
        "value": (wrong, lambda served: answer(served, {**asked, key: wrong})),
        "bytes": (content, lambda served: answer(served, content)),
        "headers": (headers, lambda served: answer(served, asked, **headers)),
        "raw": (sent, lambda served: raw(served, sent)),
        "path": (path, lambda served: text_of(httpx2.get(f"{served.url}{path}", timeout=8))),
        "long": (text[:9], lambda served: answer(served, {**asked, "messages": user(text)})),
        "good": ("", lambda served: answer(served, asked)),
        "gone": ("in the middle of its answer", lambda served: raw(served, streamed, good=True)),
    }
    what, act = acts[kind]
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
    *_, last = respond(models, picture, question, eviction, keep, "model", False)
    sides = len(models.sides)
    if len(last[sides + 2]) < sides:
        raise ValueError(last[sides + 1]["value"])
    return [str(text) for text in last[:sides]]


def demo(draw: random.Random, place: Place) -> Case:
    kind = draw.choice(("upload", "upload", "upload", "file", "question", "keep", "eviction", "none", "host", "whole"))
    if kind == "host":
        from subtoken_train.demo.local_server import check_address

        host = draw.choice(HOSTS)
        return Case(f"an address {host[:30]!r}", lambda: check_address(host, 7860), Expect.REFUSED)
    content, what = (place.pool / "images/a.png").read_bytes(), kind
    if kind == "upload":
        _, content, what = draw.choice((spoilt(draw, place.pool), turned(draw), of_mode(draw)))
    path, right = place.write("upload.png", content), right_picture(content)
    if kind == "file":
        what = no_file(draw, path)
    question = draw.choice(QUESTIONS) if kind == "question" else "what ?"
    keep = draw.choice(KEEPS) if kind == "keep" else "0.5"
    odd = {"keep": ("snapkv",), "eviction": EVICTIONS, "whole": (None, "knorm", "ada(snapkv)")}
    eviction, given = draw.choice(odd.get(kind, (None,))), None if kind == "none" else str(path)

    def plain() -> list[str]:
        assert right is not None
        other = place.root / "plain.png"
        other.write_bytes(encoded(right))
        return ask(place.pool, str(other), question, eviction, keep)

    told = f"the page: {what} {question[:20]!r} {eviction!r} {keep[:20]!r}"
    expect = Expect.TAKEN if right is not None and kind in ("upload", "whole") else Expect.REFUSED
    return Case(told, lambda: ask(place.pool, given, question, eviction, keep), expect, reference=made(plain))
