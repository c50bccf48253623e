"""The judge itself: a planted traceback, hang, canary, loss, and the others, are each seen; what is right is clean."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.hostile import canary_module, watch
from tests.hostile.case import Case, Expect, Place, Verdict
from tests.hostile.known import Format, damage, parsed_json
from tests.hostile.references import alike, same
from tests.hostile.runner import message_fault, run_case

HELP = ["recipes", "--help"]
COPY = ["recipes", "copy"]


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """A function from a case's maker to its outcome."""
    monkeypatch.setattr(watch, "SECONDS", 1.0)
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


class Panic(BaseException):
    """As a library in Rust raises it."""


def panic():
    raise Panic


def lost_thread():
    thread = threading.Thread(target=panic)
    thread.start()
    thread.join()


def import_canary():
    __import__(canary_module.NAME)


def write(path: Path):
    path.write_text("changed\n")


def seen(answer):
    """A reference that finds nothing."""
    return


def case(act, expect=Expect.TAKEN, writes=(), **more):
    """A case whose answer is right whatever it is."""
    return Case("", act, expect, writes, reference=seen, **more)


def os_error():
    raise FileNotFoundError(2, "No such file or directory", "a.txt")


def our_os_error():
    raise FileNotFoundError("a.txt is not there; name one that is")


def outside(place: Path) -> Path:
    """A path that is not below the case's folder."""
    return place.root.parent / "outside"


def made_and_removed(path: Path):
    write(path)
    path.unlink()


PLANTED = {
    "a TypeError": (lambda place: case(lambda: len(5)), Verdict.TRACEBACK),
    "a ValueError that nobody worded": (lambda place: case(b"\xff".decode), Verdict.TRACEBACK),
    "a panic": (lambda place: case(panic), Verdict.TRACEBACK),
    "a panic of a thread": (lambda place: case(lost_thread), Verdict.TRACEBACK),
    "a file that came, replaced": (lambda place: case(lambda: [write(place.work / name) for name in "ab"],
    writes=("a",),
    comes=place.work / "b"), Verdict.LOST),
    "a file that came, left alone": (lambda place: case(lambda: write(place.work / "a"), writes=("a",),
    comes=place.work / "b"), Verdict.CLEAN),
    "letters that turn": (lambda place: case(lambda: print("a\u061c\u200b")), Verdict.MESSAGE),
    "an endless loop": (lambda place: case(spin), Verdict.HANG),
    "an endless loop that catches": (lambda place: case(swallow), Verdict.HANG),
    "a pipe that nobody writes": (lambda place: case(lambda: _read_pipe(place)), Verdict.HANG),
    "too much memory": (lambda place: case(lambda: len(b"x" * 2**28)), Verdict.MEMORY),
    "a program": (lambda place: case(lambda: subprocess.run(["true"], check=True)), Verdict.CODE),
    "a shell": (lambda place: case(lambda: os.system("true")), Verdict.CODE),
    "the canary's file": (lambda place: case(lambda: write(place.canary)), Verdict.CODE),
    "the canary's module": (lambda place: case(import_canary), Verdict.CODE),
    "a neighbour changed": (lambda place: case(lambda: write(place.root / "beside/notes.txt")), Verdict.LOST),
    "a neighbour gone": (lambda place: case((place.work / "diary.txt").unlink), Verdict.LOST),
    "a refusal that wrote": (lambda place: case(lambda: (write(place.work / "diary.txt"), refuse())), Verdict.LOST),
    "its own output changed, and refused": (
        lambda place: case(lambda: (write(place.work / "diary.txt"), refuse()), writes=("diary.txt",)),
        Verdict.LOST,
    ),
    "a file moved, content and all": (
        lambda place: case(lambda: (place.work / "diary.txt").rename(place.work / "old.txt"), moves=("diary.txt",
        "old.txt")),
        Verdict.CLEAN,
    ),
    "a file beside": (lambda place: case(lambda: write(place.root / "new.txt")), Verdict.LEFT),
    "a folder after a refusal": (lambda place: case(lambda: ((place.work / "out").mkdir(), refuse()), Expect.REFUSED,
    writes=("out",)), Verdict.LEFT),
    "a wrong acceptance": (lambda place: Case("", HELP, Expect.REFUSED), Verdict.WRONG),
    "a wrong refusal": (lambda place: case(["recipes", "nope"], Expect.TAKEN), Verdict.REFUSAL),
    "an answer that differs": (
        lambda place: Case("", HELP, Expect.TAKEN, reference=lambda answer: "no"), Verdict.WRONG
    ),
    "an answer that differs, where nobody knows": (
        lambda place: Case("", HELP, Expect.EITHER, reference=lambda answer: "no", why="nobody knows"), Verdict.WRONG
    ),
    "an answer that cannot be compared": (
        lambda place: Case("", HELP, Expect.TAKEN, reference=lambda answer: answer.value.nothing), Verdict.WRONG
    ),
    "another result than the original's": (
        lambda place: Case("", ["recipes", "ls"], Expect.TAKEN, reference=same(place, ["recipes", "ls", "tinylm"])),
        Verdict.WRONG,
    ),
    "another file than the original's": (
        lambda place: Case("", [*COPY, "tiny_lora_only", "a"], Expect.TAKEN, ("a",),
        reference=same(place, [*COPY, "tiny_lora_only_c", "a"], ["a"])), Verdict.WRONG,
    ),
    "the original's result": (
        lambda place: Case("", [*COPY, "tiny_lora_only", "a"], Expect.TAKEN, ("a",),
        reference=same(place, [*COPY, "tiny_lora_only", "a"], ["a"])), Verdict.CLEAN,
    ),
    "the system's words": (lambda place: case(os_error, Expect.REFUSED), Verdict.TRACEBACK),
    "the system's words of a command": (
        lambda place: case(["export", "adapter", "out"], Expect.REFUSED, says=("nothing of this",)), Verdict.MESSAGE
    ),
    "our words for the system's": (lambda place: case(our_os_error, Expect.REFUSED), Verdict.CLEAN),
    "a refusal of something else": (lambda place: case(refuse, Expect.REFUSED, says=("--out",)), Verdict.MESSAGE),
    "a refusal of the very thing": (lambda place: case(refuse, Expect.REFUSED, says=("a word",)), Verdict.CLEAN),
    "a file anywhere": (lambda place: case(lambda: write(outside(place))), Verdict.LEFT),
    "a file anywhere, changed": (
        lambda place: (write(outside(place)), case(lambda: write(outside(place))))[1], Verdict.LOST
    ),
    "a file anywhere, gone": (
        lambda place: (write(outside(place)), case(outside(place).unlink))[1], Verdict.LOST
    ),
    "a file anywhere, in passing": (lambda place: case(lambda: made_and_removed(outside(place))), Verdict.CLEAN),
    "a file at home": (lambda place: case(lambda: write(Path.home() / ".mine")), Verdict.LEFT),
    "a temporary file": (lambda place: case(lambda: tempfile.mkstemp()[1]), Verdict.LEFT),
    "a temporary folder, in passing": (
        lambda place: case(lambda: tempfile.TemporaryDirectory().cleanup()), Verdict.CLEAN
    ),
    "a file on a full disk": (lambda place: case(lambda: write(place.work / "out"), room=0, writes=("out",)),
    Verdict.TRACEBACK),
    "no words": (lambda place: case(lambda: refuse(""), Expect.REFUSED), Verdict.MESSAGE),
    "Python's words": (lambda place: case(lambda: refuse("'NoneType' object has no attribute 'x'"),
    Expect.REFUSED),
    Verdict.MESSAGE),
    "a refusal in words": (lambda place: case(refuse, Expect.REFUSED), Verdict.CLEAN),
    "a refusal of the command line": (lambda place: case(["recipes", "nope"], Expect.REFUSED), Verdict.CLEAN),
    "an output": (lambda place: case(lambda: write(place.work / "out"), Expect.TAKEN, ("out",)), Verdict.CLEAN),
    "a help page": (lambda place: case(HELP, Expect.TAKEN), Verdict.CLEAN),
}  # fmt: skip


def _read_pipe(place: Place) -> bytes:
    path = place.root / "pipe"
    os.mkfifo(path)
    try:
        return path.read_bytes()
    finally:
        path.unlink()


@pytest.fixture(autouse=True)
def nothing_outside(tmp_path):
    """Whatever a planted case left beside the case's folder."""
    yield
    (tmp_path / "outside").unlink(missing_ok=True)


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_seen(judge, monkeypatch, name):
    monkeypatch.setattr(watch, "STUCK", 1.0)
    make, verdict = PLANTED[name]
    outcome = judge(make)
    assert outcome.verdict is verdict, outcome.detail


def test_a_failure_of_ours_is_a_traceback(judge, monkeypatch):
    from subtoken_train.cli import recipes

    monkeypatch.setattr(recipes, "run", lambda args: 1 // 0)
    outcome = judge(lambda place: case(["recipes", "ls"]))
    assert outcome.verdict is Verdict.TRACEBACK
    assert "ZeroDivisionError" in outcome.detail


def test_no_case_is_taken_unseen():
    for expect in (Expect.TAKEN, Expect.EITHER):
        with pytest.raises(ValueError, match="nothing to compare"):
            Case("", HELP, expect, why="nobody knows")
    for expect, why in ((Expect.EITHER, ""), (Expect.TAKEN, "nobody knows"), (Expect.REFUSED, "nobody knows")):
        with pytest.raises(ValueError, match="a reason belongs"):
            Case("", HELP, expect, reference=seen, why=why)


TREE = {"a": 1, "b": {"c": "x", "note": [1]}, "d": [0.5, 2.0]}
FORM = Format(
    free=("b.note",),
    optional=("d",),
    more=("b",),
    legal={"a": lambda value: type(value) is int and value > 0},
    exact=("b.c",),
)


@pytest.mark.parametrize(
    ("after", "right"),
    [
        (TREE, Expect.TAKEN),
        ({**TREE, "a": "1"}, Expect.REFUSED),
        ({**TREE, "a": True}, Expect.REFUSED),
        ({**TREE, "a": -1}, Expect.REFUSED),
        ({**TREE, "a": 2}, None),  # as good as any, and no longer the original
        ({**TREE, "e": 1}, Expect.REFUSED),
        ({**TREE, "b": {**TREE["b"], "e": 1}}, Expect.TAKEN),
        ({**TREE, "b": {**TREE["b"], "note": None}}, Expect.TAKEN),
        ({**TREE, "b": {**TREE["b"], "c": "y"}}, Expect.REFUSED),
        ({"a": 1, "b": TREE["b"]}, Expect.TAKEN),
        ({"b": TREE["b"], "d": TREE["d"]}, Expect.REFUSED),
        ({**TREE, "d": [0.5, float("nan")]}, Expect.REFUSED),
        ({**TREE, "d": [0.5, None]}, Expect.REFUSED),
        ({**TREE, "d": [0.5, 3.0]}, None),
        ({**TREE, "b": {**TREE["b"], "note": "\ud800"}}, Expect.REFUSED),
        (None, Expect.REFUSED),
    ],
)
def test_what_is_known_of_a_document(after, right):
    assert FORM.right(TREE, after) is right


def test_spoilt_bytes_are_read_another_way():
    content = json.dumps(TREE, indent=1).encode()
    for seed in range(200):
        spoilt, what, expect = damage(random.Random(seed), content, parsed_json, FORM)
        try:
            same_tree = json.loads(spoilt) == TREE
        except ValueError:
            same_tree = False
        assert expect is (Expect.TAKEN if same_tree else Expect.REFUSED) or b"note" in content, what


def test_alike_is_bit_for_bit():
    ones = torch.ones(2)
    assert alike({"a": [ones, float("nan")]}, {"a": [ones.clone(), float("nan")]})
    assert not alike(ones, ones.double())
    assert not alike(ones, ones + 1e-7)
    assert not alike([1], [1.0])
    assert not alike([1], [1, 2])
    assert not alike({"a": 1}, {"b": 1})


@pytest.mark.slow
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
        ERROR + "No such file or directory: a.txt\n",
        ERROR + "Too many levels of symbolic links: a/b\n",
        "Traceback (most recent call last):\n" + ERROR + "a word is wrong\n",
    ],
)
def test_messages_that_are_none(err):
    assert message_fault(err) is not None


@pytest.mark.parametrize("before", ["", "subtoken-train: warning: a word\n", "3/4 questions\n"])
def test_one_line_is_a_message(before):
    assert message_fault(f"{before}{ERROR}a word is wrong\n") is None


def test_a_file_without_a_name_changes_no_folder(tmp_path):
    """As locks try it; a named file in the same folder is seen as before."""
    seen = watch.Watch()
    with watch.watched(seen):
        os.close(os.open(tmp_path, os.O_RDWR | os.O_TMPFILE))
        (tmp_path / "named").write_text("x")
    assert seen.touched == [(str(tmp_path / "unnamed"), "open", False), (str(tmp_path / "named"), "open", False)]
    assert list(tmp_path.iterdir()) == [tmp_path / "named"]
