"""The judge: what is planted is seen, what is right is clean; and inputs of every class are answered in words."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import runner as watch
from tests.hostile.campaign import CLASSES, bad, plan, run_cases
from tests.hostile.case import CANARY_MODULE, Case, Expect, Place, Verdict, install_canary, same
from tests.hostile.runner import message_fault, run_case
from tests.support.sampling import sampled

SEED, PARTS, EACH = 1, 13, 16
HELP, COPY = ["recipes", "--help"], ["recipes", "copy"]


@sampled("part", range(PARTS), every=8)
def test_hostile_inputs_are_answered_in_words(pool, tmp_path, part):
    outcomes = list(run_cases(plan(SEED, PARTS * EACH)[part::PARTS], tmp_path, pool))
    assert len(outcomes) == EACH
    assert bad(outcomes) == []


def test_every_class_has_its_turn():
    names = [name for name, _ in plan(SEED, PARTS * EACH)]
    assert set(names) == set(CLASSES)
    assert min(map(names.count, CLASSES)) >= 4


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """A function from a case's maker to its outcome; what a planted case left beside its folder goes."""
    for name, value in (("SECONDS", 1.0), ("MEMORY", 2**27), ("STUCK", 1.0)):
        monkeypatch.setattr(watch, name, value)
    install_canary(tmp_path / "modules")
    yield lambda make: run_case("planted", lambda draw, place: make(place), 0, Place(tmp_path / "case", tmp_path))
    sys.path.remove(str(tmp_path / "modules"))
    (tmp_path / "outside").unlink(missing_ok=True)


class Panic(BaseException):
    """As a library in Rust raises it."""


def throw(error: BaseException):
    raise error


def refuse(words="a word is wrong"):
    raise ValueError(words)


def swallow():
    for _ in range(10**9):
        try:
            time.sleep(0.001)
        except Exception:
            continue


def lost_thread():
    thread = threading.Thread(target=throw, args=(Panic(),))
    thread.start()
    thread.join()


def spin():
    while True:
        pass


def write(path: Path):
    path.write_text("changed\n")


def seen(answer):
    """A reference that finds nothing."""
    return


def outside(place: Place) -> Path:
    """A path that is not below the case's folder."""
    return place.root.parent / "outside"


def read_pipe(path: Path) -> bytes:
    os.mkfifo(path)
    try:
        return path.read_bytes()
    finally:
        path.unlink()


WRONG = {"expect": Expect.REFUSED}
GONE = FileNotFoundError(2, "No such file or directory", "a.txt")
WORDED = FileNotFoundError("a.txt is not there; name one that is")
ACTS: dict[str, tuple[Verdict, Callable[[Place], Any], dict[str, Any]]] = {  # what a function does, and what is seen
    "a TypeError": (Verdict.TRACEBACK, lambda place: len(5), {}),
    "a ValueError that nobody worded": (Verdict.TRACEBACK, lambda place: b"\xff".decode(), {}),
    "a panic": (Verdict.TRACEBACK, lambda place: throw(Panic()), {}),
    "a panic of a thread": (Verdict.TRACEBACK, lambda place: lost_thread(), {}),
    "a file that came, replaced": (
        Verdict.LOST, lambda place: [write(place.work / name) for name in "ab"], {"writes": ("a",), "comes": "b"}),
    "a file that came, left alone": (
        Verdict.CLEAN, lambda place: write(place.work / "a"), {"writes": ("a",), "comes": "b"}),
    "letters that turn": (Verdict.MESSAGE, lambda place: print("a\u061c\u200b"), {}),
    "an endless loop": (Verdict.HANG, lambda place: spin(), {}),
    "an endless loop that catches": (Verdict.HANG, lambda place: swallow(), {}),
    "a pipe that nobody writes": (Verdict.HANG, lambda place: read_pipe(place.root / "pipe"), {}),
    "too much memory": (Verdict.MEMORY, lambda place: len(b"x" * 2**28), {}),
    "a program": (Verdict.CODE, lambda place: subprocess.run(["true"], check=True), {}),
    "a shell": (Verdict.CODE, lambda place: os.system("true"), {}),
    "the canary's file": (Verdict.CODE, lambda place: write(place.canary), {}),
    "the canary's module": (Verdict.CODE, lambda place: __import__(CANARY_MODULE), {}),
    "a neighbour changed": (Verdict.LOST, lambda place: write(place.root / "beside/notes.txt"), {}),
    "a neighbour gone": (Verdict.LOST, lambda place: (place.work / "diary.txt").unlink(), {}),
    "its own output changed, and refused": (
        Verdict.LOST, lambda place: (write(place.work / "diary.txt"), refuse()), {"writes": ("diary.txt",)}),
    "a file moved, content and all": (
        Verdict.CLEAN, lambda place: (place.work / "diary.txt").rename(place.work / "old.txt"),
        {"moves": ("diary.txt", "old.txt")}),
    "a file beside": (Verdict.LEFT, lambda place: write(place.root / "new.txt"), {}),
    "a folder after a refusal": (
        Verdict.LEFT, lambda place: ((place.work / "out").mkdir(), refuse()), {**WRONG, "writes": ("out",)}),
    "the system's words": (Verdict.TRACEBACK, lambda place: throw(GONE), WRONG),
    "our words for the system's": (Verdict.CLEAN, lambda place: throw(WORDED), WRONG),
    "a refusal of something else": (Verdict.MESSAGE, lambda place: refuse(), {**WRONG, "says": ("--out",)}),
    "a refusal of the very thing": (Verdict.CLEAN, lambda place: refuse(), {**WRONG, "says": ("a word",)}),
    "a file anywhere": (Verdict.LEFT, lambda place: write(outside(place)), {}),
    "a file anywhere, changed": (Verdict.LOST, lambda place: write(outside(place)), {"before": True}),
    "a file anywhere, gone": (Verdict.LOST, lambda place: outside(place).unlink(), {"before": True}),
    "a file anywhere, in passing": (
        Verdict.CLEAN, lambda place: (write(outside(place)), outside(place).unlink()), {}),
    "a file at home": (Verdict.LEFT, lambda place: write(Path.home() / ".mine"), {}),
    "a temporary file": (Verdict.LEFT, lambda place: tempfile.mkstemp()[1], {}),
    "a temporary folder, in passing": (Verdict.CLEAN, lambda place: tempfile.TemporaryDirectory().cleanup(), {}),
    "a file on a full disk": (
        Verdict.TRACEBACK, lambda place: write(place.work / "out"), {"room": 0, "writes": ("out",)}),
    "no words": (Verdict.MESSAGE, lambda place: refuse(""), WRONG),
    "Python's words": (Verdict.MESSAGE, lambda place: refuse("'NoneType' object has no attribute 'x'"), WRONG),
    "an output": (Verdict.CLEAN, lambda place: write(place.work / "out"), {"writes": ("out",)}),
}  # fmt: skip
SAME, OTHER = [*COPY, "tiny_lora_only", "a"], [*COPY, "tiny_lora_only_c", "a"]
COMMANDS: dict[str, tuple[Verdict, list[str], Expect, Callable[[Place], Any] | None]] = {
    "a wrong acceptance": (Verdict.WRONG, HELP, Expect.REFUSED, None),
    "a wrong refusal": (Verdict.REFUSAL, ["recipes", "nope"], Expect.TAKEN, lambda place: seen),
    "an answer that differs": (Verdict.WRONG, HELP, Expect.TAKEN, lambda place: lambda answer: "no"),
    "an answer that cannot be compared": (
        Verdict.WRONG, HELP, Expect.TAKEN, lambda place: lambda answer: answer.value.nothing),
    "another result than the original's": (
        Verdict.WRONG, ["recipes", "ls"], Expect.TAKEN, lambda place: same(place, ["recipes", "ls", "tinylm"])),
    "another file than the original's": (Verdict.WRONG, SAME, Expect.TAKEN, lambda place: same(place, OTHER, ["a"])),
    "the original's result": (Verdict.CLEAN, SAME, Expect.TAKEN, lambda place: same(place, SAME, ["a"])),
    "the system's words of a command": (Verdict.MESSAGE, ["export", "adapter", "out"], Expect.REFUSED, None),
    "a refusal of the command line": (Verdict.CLEAN, ["recipes", "nope"], Expect.REFUSED, None),
    "a help page": (Verdict.CLEAN, HELP, Expect.TAKEN, lambda place: seen),
}  # fmt: skip


def made_case(place: Place, name: str) -> Case:
    """A planted case; a function's answer is right whatever it is."""
    if name in COMMANDS:
        _, words, expect, reference = COMMANDS[name]
        says = ("nothing of this",) if words[0] == "export" else ()
        return Case("", words, expect, ("a",), reference=reference and reference(place), says=says)
    _, act, more = ACTS[name]
    more = {"expect": Expect.TAKEN, **more}
    if more.pop("before", False):
        write(outside(place))
    if "comes" in more:
        more["comes"] = place.work / more["comes"]
    return Case("", lambda: act(place), reference=seen, **more)


@pytest.mark.parametrize("name", [*ACTS, *COMMANDS])
def test_what_is_planted_is_seen(judge, name):
    outcome = judge(lambda place: made_case(place, name))
    assert outcome.verdict is {**ACTS, **COMMANDS}[name][0], outcome.detail


def test_a_failure_of_ours_is_a_traceback(judge, monkeypatch):
    from subtoken_train.cli import recipes

    monkeypatch.setattr(recipes, "run", lambda args: 1 // 0)
    outcome = judge(lambda place: Case("", ["recipes", "ls"], Expect.TAKEN, reference=seen))
    assert outcome.verdict is Verdict.TRACEBACK
    assert "ZeroDivisionError" in outcome.detail


ERROR = "subtoken-train: error: "
FAULTS = (
    "", "\n", ERROR + "\n", ERROR + "a word is wrong", ERROR + "x y" * 150 + "\n", ERROR + "a b\nc d\n",
    "something else\n" + ERROR + "a word is wrong\n", ERROR + "a word is wrong\nsomething else\n",
    ERROR + "ValueError\n", ERROR + "\x1b[31mred word\n", ERROR + "int() got an unexpected keyword argument 'x'\n",
    ERROR + "No such file or directory: a.txt\n", ERROR + "Too many levels of symbolic links: a/b\n",
    "Traceback (most recent call last):\n" + ERROR + "a word is wrong\n",
)  # fmt: skip


def test_messages_that_are_none_and_one_line_that_is():
    for err in FAULTS:
        assert message_fault(err) is not None, err
    for before in ("", "subtoken-train: warning: a word\n", "3/4 questions\n"):
        assert message_fault(f"{before}{ERROR}a word is wrong\n") is None


def test_a_file_without_a_name_changes_no_folder(tmp_path):
    """As locks try it; a named file in the same folder is seen as before."""
    seen = watch.Watch()
    with watch.watched(seen):
        os.close(os.open(tmp_path, os.O_RDWR | os.O_TMPFILE))
        (tmp_path / "named").write_text("x")
    assert seen.touched == [(str(tmp_path / "unnamed"), "open", False), (str(tmp_path / "named"), "open", False)]
    assert list(tmp_path.iterdir()) == [tmp_path / "named"]
