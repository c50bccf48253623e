"""What visitors of the page of ``demo`` send: uploads, questions, evictions and budgets; and where it shall listen."""

from __future__ import annotations

import random
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

from tests.hostile.case import Case, Expect, Place, Reference
from tests.hostile.decoding import as_png, right_picture
from tests.hostile.picture_forms import of_mode, turned
from tests.hostile.pictures import SUFFIXES, spoilt
from tests.hostile.pool import VLM
from tests.hostile.references import made
from tests.hostile.values import no_file

QUESTIONS = ("", " ", "\x00", "\ud800", "<image><image>")
KEEPS = ("", "0", "-1", "NaN", "inf", "1.5", "x", "5%", "0tokens", "-5tokens", "MB", "9" * 400)
EVICTIONS = ("nope", "snapkv ", "../x", "os.system", "ada(", "ada(nope)", "\x00")
HOSTS = ("nowhere.invalid", "::1", "", "999.1.1.1", "\x00", "x" * 300, "1.2.3.4", "-", "a b")


@cache
def page(pool: Path) -> tuple[Any, Any]:
    """The models of the page, and its handler; where Gradio is not installed, a stub of what the handler calls."""
    from subtoken_train.demo.side_by_side import SideBySide

    try:
        import gradio  # noqa: F401
    except ImportError:
        stub = types.ModuleType("gradio")
        stub.update = lambda **what: what  # type: ignore[attr-defined]
        sys.modules["gradio"] = stub
        from subtoken_train.demo import blocks

        del sys.modules["gradio"]
    else:
        from subtoken_train.demo import blocks
    adapter = pool / "adapters" / VLM
    return SideBySide(str(adapter), f"{adapter}_anchor", device="cpu"), blocks._respond


def ask(pool: Path, picture: str | None, question: str, eviction: str | None, keep: str) -> list[str]:
    """The answers' texts, as the page shows them."""
    models, respond = page(pool)
    *_, last = respond(models, picture, question, eviction, keep, "model")
    sides = len(models.sides)
    words = last[sides + 1]["value"]
    answered = len(last[sides + 2])
    if answered < sides:
        raise ValueError(words)
    return [str(text) for text in last[:sides]]


def as_plain(place: Place, content: bytes, question: str, eviction: str | None, keep: str) -> Reference:
    """The page must answer what it answers to the same picture as a plain PNG."""

    def right() -> list[str]:
        picture = right_picture(content)
        assert picture is not None
        path = place.root / "plain.png"
        path.write_bytes(as_png(picture))
        return ask(place.pool, str(path), question, eviction, keep)

    return made(right)


def upload(draw: random.Random, place: Place, path: Path) -> tuple[bytes, str, bool]:
    """Put something at the upload's path: its bytes, what it is, and whether it is a picture."""
    form = draw.choice(("damaged", "bomb", "turned", "mode", "file"))
    content = (place.pool / f"images/a.{draw.choice(SUFFIXES)}").read_bytes()
    what = form
    if form in ("damaged", "bomb"):
        content, what = spoilt(draw, content, form)
    elif form in ("turned", "mode"):
        _, content, what = (turned if form == "turned" else of_mode)(draw)
    path.write_bytes(content)
    if form == "file":
        return content, no_file(draw, path), False
    return content, what, right_picture(content) is not None


def make(draw: random.Random, place: Place) -> Case:
    """A request with one thing wrong in it, or an address that is none."""
    kind = draw.choice(("upload", "upload", "upload", "question", "keep", "eviction", "none", "host", "control"))
    if kind == "host":
        return address(draw)
    content, question, eviction, keep = (place.pool / "images/a.png").read_bytes(), "what ?", None, "0.5"
    path, what, right = place.write("upload.png", content), kind, kind == "control"
    if kind == "upload":
        content, what, right = upload(draw, place, path)
    elif kind == "question":
        question = draw.choice(QUESTIONS)
    elif kind == "keep":
        eviction, keep = "snapkv", draw.choice(KEEPS)
    elif kind == "eviction":
        eviction = draw.choice(EVICTIONS)
    elif kind == "control":
        eviction = draw.choice((None, "knorm", "ada(snapkv)"))
    told = f"the page: {what} {question[:20]!r} {eviction!r} {keep[:20]!r}"
    given = None if kind == "none" else str(path)
    reference = as_plain(place, content, question, eviction, keep)
    expect = Expect.TAKEN if right else Expect.REFUSED
    return Case(told, lambda: ask(place.pool, given, question, eviction, keep), expect, reference=reference)


def address(draw: random.Random) -> Case:
    """Where the page cannot listen."""
    from subtoken_train.demo.local_server import check_address

    host = draw.choice(HOSTS)
    return Case(f"an address {host[:30]!r}", lambda: check_address(host, 7860), Expect.REFUSED)
