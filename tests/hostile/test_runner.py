"""The judge itself: a planted traceback, hang, canary, loss, and the others, are each seen; what is right is clean."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hostile import canary_module, watch
from tests.hostile.case import Case, Expect, Place, Verdict
from tests.hostile.runner import message_fault, run_case

HELP = ["recipes", "--help"]


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """A function from a case's maker to its outcome."""
    monkeypatch.setattr(watch, "SECONDS", 0.5)
    monkeypatch.setattr(watch, "MEMORY", 2**27)
    canary_module.install(tmp_path / "modules")

    def run(make):
        return run_case("planted", lambda draw, place: make(place), 0, Place(tmp_path / "case", tmp_path))

    yield run
    sys.path.remove(str(tmp_path / "modules"))


def refuse(words="a word is wrong"):
    raise ValueError(words)


def spin():
    while True:
        pass


def swallow():
    """Holds every ordinary exception, for a while."""
    for _ in range(10**9):
        try:
            time.sleep(0.001)
        except Exception:
            continue


def import_canary():
    __import__(canary_module.NAME)


def write(path: Path):
    path.write_text("changed\n")


PLANTED = {
    "a TypeError": (lambda place: Case("", lambda: len(5)), Verdict.TRACEBACK),
    "a ValueError that nobody worded": (lambda place: Case("", b"\xff".decode), Verdict.TRACEBACK),
    "an endless loop": (lambda place: Case("", spin), Verdict.HANG),
    "an endless loop that catches": (lambda place: Case("", swallow), Verdict.HANG),
    "a pipe that nobody writes": (lambda place: Case("", lambda: _read_pipe(place)), Verdict.HANG),
    "too much memory": (lambda place: Case("", lambda: len(b"x" * 2**28)), Verdict.MEMORY),
    "a program": (lambda place: Case("", lambda: subprocess.run(["true"], check=True)), Verdict.CODE),
    "a shell": (lambda place: Case("", lambda: os.system("true")), Verdict.CODE),
    "the canary's file": (lambda place: Case("", lambda: write(place.canary)), Verdict.CODE),
    "the canary's module": (lambda place: Case("", import_canary), Verdict.CODE),
    "a neighbour changed": (lambda place: Case("", lambda: write(place.root / "beside/notes.txt")), Verdict.LOST),
    "a neighbour gone": (lambda place: Case("", (place.work / "diary.txt").unlink), Verdict.LOST),
    "a refusal that wrote": (lambda place: Case("", lambda: (write(place.work / "diary.txt"), refuse())), Verdict.LOST),
    "its own output changed, and refused": (
        lambda place: Case("", lambda: (write(place.work / "diary.txt"), refuse()), writes=("diary.txt",)),
        Verdict.LOST,
    ),
    "a file moved, content and all": (
        lambda place: Case("", lambda: (place.work / "diary.txt").rename(place.work / "old.txt"), moves=("diary.txt",
        "old.txt")),
        Verdict.CLEAN,
    ),
    "a file beside": (lambda place: Case("", lambda: write(place.root / "new.txt")), Verdict.LEFT),
    "a folder after a refusal": (lambda place: Case("", lambda: ((place.work / "out").mkdir(), refuse()),
    writes=("out",)), Verdict.LEFT),
    "a wrong acceptance": (lambda place: Case("", HELP, Expect.REFUSED), Verdict.WRONG),
    "a wrong refusal": (lambda place: Case("", ["recipes", "nope"], Expect.TAKEN), Verdict.REFUSAL),
    "an answer that an oracle refuses": (lambda place: Case("", HELP, complaint=lambda answer: "no"), Verdict.WRONG),
    "no words": (lambda place: Case("", lambda: refuse("")), Verdict.MESSAGE),
    "Python's words": (lambda place: Case("", lambda: refuse("'NoneType' object has no attribute 'x'")),
    Verdict.MESSAGE),
    "a refusal in words": (lambda place: Case("", refuse, Expect.REFUSED), Verdict.CLEAN),
    "a refusal of the command line": (lambda place: Case("", ["recipes", "nope"], Expect.REFUSED), Verdict.CLEAN),
    "an output": (lambda place: Case("", lambda: write(place.work / "out"), Expect.TAKEN, ("out",)), Verdict.CLEAN),
    "a help page": (lambda place: Case("", HELP, Expect.TAKEN), Verdict.CLEAN),
}  # fmt: skip


def _read_pipe(place: Place) -> bytes:
    path = place.root.parent / f"pipe-{os.getpid()}"
    os.mkfifo(path)
    try:
        return path.read_bytes()
    finally:
        path.unlink()


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_seen(judge, monkeypatch, name):
    monkeypatch.setattr(watch, "STUCK", 1.0)
    make, verdict = PLANTED[name]
    outcome = judge(make)
    assert outcome.verdict is verdict, outcome.detail


def test_a_failure_of_ours_is_a_traceback(judge, monkeypatch):
    from subtoken_train.cli import recipes

    monkeypatch.setattr(recipes, "run", lambda args: 1 // 0)
    outcome = judge(lambda place: Case("", ["recipes", "ls"]))
    assert outcome.verdict is Verdict.TRACEBACK
    assert "ZeroDivisionError" in outcome.detail


def test_a_case_is_made_anew_from_its_name(tmp_path, pool):
    from tests.hostile.registry import CLASSES

    for name, (make, _) in CLASSES.items():
        first, again = (run_case(name, make, 7, Place(tmp_path / folder / "case", pool)) for folder in ("a", "b"))
        assert (first.what, first.verdict) == (again.what, again.verdict)


ERROR = "subtoken-train: error: "


@pytest.mark.parametrize(
    "err",
    [
        "",
        "\n",
        ERROR + "\n",
        ERROR + "a word is wrong",
        ERROR + "x y" * 150 + "\n",
        ERROR + "a b\nc d\n",
        "something else\n" + ERROR + "a word is wrong\n",
        ERROR + "a word is wrong\nsomething else\n",
        ERROR + "ValueError\n",
        ERROR + "\x1b[31mred word\n",
        ERROR + "int() got an unexpected keyword argument 'x'\n",
        "Traceback (most recent call last):\n" + ERROR + "a word is wrong\n",
    ],
)
def test_messages_that_are_none(err):
    assert message_fault(err) is not None


@pytest.mark.parametrize("before", ["", "subtoken-train: warning: a word\n", "3/4 questions\n"])
def test_one_line_is_a_message(before):
    assert message_fault(f"{before}{ERROR}a word is wrong\n") is None
