"""Runs one case in this process and judges what came of it."""

from __future__ import annotations

import hashlib
import io
import os
import random
import re
import shutil
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from tests.hostile import canary_module
from tests.hostile.case import CANARY, Answer, Case, Expect, Outcome, Place, Verdict
from tests.hostile.watch import Stopped, watched

PREFIX = "subtoken-train: "
LIMIT = 400
"""Characters of a message."""
PYTHON_WORDS = (
    "codec can't", "NoneType", "has no attribute", "unhashable", "<class '", "Traceback", " object at 0x",
    "not subscriptable", "unsupported operand", "[Errno ", "not iterable", "unexpected keyword argument",
    "positional argument", "invalid literal for int", "could not convert string to float", "<function ",
)  # fmt: skip
"""What stands in a message that nobody worded."""
PROGRESS = re.compile(r"[\d,]+/[\d,]+ .*|resuming from .*|.* of the text is unknown to the tokenizer .*|")
"""What a command says on stderr while it works."""
HIDDEN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""Warnings that Python shows to nobody unless asked to."""
Make = Callable[[random.Random, Place], Case]


def run_case(name: str, make: Make, seed: int, place: Place) -> Outcome:
    """Make a case from its seed, run it, judge it; ``place.root`` is made anew and removed."""
    shutil.rmtree(place.root, ignore_errors=True)
    place.work.mkdir(parents=True)
    neighbours(place)
    home = Path.cwd()
    try:
        case = make(random.Random(f"{name}:{seed}"), place)
        before = snapshot(place.root)
        os.chdir(place.work)
        clock = time.monotonic()
        answer, verdict, detail = _run(case)
        seconds = time.monotonic() - clock
        os.chdir(home)
        order = list(Verdict)
        verdict, detail = min(
            ((verdict, detail), *_harm(case, place, before, answer)), key=lambda found: order.index(found[0])
        )
        code = None if answer is None else answer.code
        return Outcome(f"{name}:{seed}", case.what, verdict, detail, case.expect, code, seconds)
    finally:
        os.chdir(home)
        _remove(place.root)


def neighbours(place: Place) -> None:
    """What lies beside the working folder, and is nobody's business."""
    beside = place.root / "beside"
    beside.mkdir()
    (beside / "notes.txt").write_text("a year of work\n")
    (place.work / "diary.txt").write_text("mine\n")


def _run(case: Case) -> tuple[Answer | None, Verdict, str]:
    """The answer, and the verdict as far as it follows from it alone."""
    canary_module.forget()
    try:
        with watched() as started, warnings.catch_warnings():
            warnings.simplefilter("default")
            for hidden in HIDDEN:
                warnings.simplefilter("ignore", hidden)
            answer = _command(case.act) if isinstance(case.act, list | tuple) else _called(case.act)
    except Stopped as stopped:
        where = traceback.format_exc(limit=-3)
        verdict = Verdict.HANG if stopped.memory is None else Verdict.MEMORY
        return None, verdict, f"{stopped} {stopped.memory or ''} {where}"
    except (Exception, SystemExit):
        return None, Verdict.TRACEBACK, traceback.format_exc(limit=-6)
    if started:
        return answer, Verdict.CODE, f"started {started}"
    return answer, *judged(case, answer)


def _command(words: list[str] | tuple[str, ...]) -> Answer:
    from subtoken_train.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as end:  # --help
            code = end.code if isinstance(end.code, int) else 0
    return Answer(code, out.getvalue(), err.getvalue())


def _called(function: Callable[[], object]) -> Answer:
    """A function of the library: a plain ``ValueError`` or an ``OSError`` is a worded refusal, all else is none."""
    from subtoken_train.cli.terminal import one_line

    out = io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            return Answer(0, out.getvalue(), "", function())
    except (ValueError, OSError) as error:
        ours = type(error) is ValueError or type(error).__module__.startswith("subtoken_train.")
        if not (ours or isinstance(error, OSError)):
            raise
        return Answer(2, "", f"{PREFIX}error: {one_line(error)}\n")  # as a command would say it


def judged(case: Case, answer: Answer) -> tuple[Verdict, str]:
    """The verdict on an answer."""
    if answer.code not in (0, 2):
        return Verdict.TRACEBACK, f"exit code {answer.code}: {answer.err[-1500:]}"
    if answer.code == 0 and case.expect is Expect.REFUSED:
        return Verdict.WRONG, f"accepted: {answer.out[-200:]}"
    if answer.code == 2 and case.expect is Expect.TAKEN:
        return Verdict.REFUSAL, answer.err[:600]
    if answer.code == 0:
        fault = case.complaint(answer) if case.complaint is not None else None
        if fault is not None:
            return Verdict.WRONG, fault
        fault = control_characters(answer.out + answer.err)
    else:
        fault = message_fault(answer.err) or control_characters(answer.out)
    return (Verdict.CLEAN, "") if fault is None else (Verdict.MESSAGE, fault)


def message_fault(err: str) -> str | None:
    """What is wrong with the words of a refusal: warnings of ours, then one line."""
    lines = err.split("\n")
    if lines[-1]:
        return f"does not end with a newline: {err[-200:]!r}"
    *earlier, last = lines[:-1] or [""]
    if not last.startswith(f"{PREFIX}error: ") or " " not in last.removeprefix(f"{PREFIX}error: "):
        return f"no error line: {err[-600:]!r}"
    if strange := [line for line in earlier if not (line.startswith(f"{PREFIX}warning: ") or PROGRESS.fullmatch(line))]:
        return f"{len(strange)} more lines: {strange[0][:300]!r}"
    if len(last) - len(f"{PREFIX}error: ") > LIMIT:
        return f"{len(last)} characters: {last[:600]}"
    if found := [word for word in PYTHON_WORDS if word in last]:
        return f"Python's words {found}: {last}"
    return control_characters(last)


def control_characters(text: str) -> str | None:
    """Characters that act on a terminal instead of standing on it."""
    bad = {letter for letter in text if (ord(letter) < 32 and letter not in "\n\t\r") or 127 <= ord(letter) < 160}
    bad |= {letter for letter in text if letter in "\u202d\u202e\u2066\u2067"}
    return f"control characters {sorted(bad)} in {text[-300:]!r}" if bad else None


def _harm(case: Case, place: Place, before: Mapping[str, str], answer: Answer | None) -> Iterator[tuple[Verdict, str]]:
    """What the act did to the files around it, and whether an input ran."""
    if canary_module.imported() or any(path.name.startswith(CANARY) for path in place.root.rglob(f"{CANARY}*")):
        yield Verdict.CODE, "the canary was touched"
    after = snapshot(place.root)
    accepted = answer is not None and answer.code == 0
    may = [f"work/{name}" for name in (*case.writes_anyway, *(case.writes if accepted else ()))]
    moved = [f"work/{name}" for name in case.moves]
    kept = set(after.values())
    for name, content in before.items():
        if after.get(name) == content or _below(name, may):
            continue
        if not _below(name, moved) or content not in kept:
            yield Verdict.LOST, f"{name} is {'gone' if name not in after else 'changed'}"
    new = [name for name in after if name not in before and not _below(name, may) and not _below(name, moved)]
    if new:
        words = "" if answer is None or accepted else f" ({answer.err.strip()[-160:]})"
        yield Verdict.LEFT, f"made {new[:3]}{words}"


def _below(name: str, places: list[str]) -> bool:
    return any(place.endswith("/.") or name == place or name.startswith(f"{place}/") for place in places)


def snapshot(root: Path) -> dict[str, str]:
    """What every path below a folder is: a digest, a link's target, a kind."""
    found = {}
    for folder, folders, names in os.walk(root):
        for name in [*folders, *names]:
            path = Path(folder) / name
            found[os.fsencode(path.relative_to(root)).decode("utf-8", "replace")] = _content(path)
    return found


def _content(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"link to {os.readlink(path)}"
    if not stat.S_ISREG(mode):
        return f"kind {stat.S_IFMT(mode)}"
    if path.stat().st_size > 2**26:  # a sparse file
        return f"large {path.stat().st_size}"
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except PermissionError:
        return "not readable"


def _remove(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o700)
    shutil.rmtree(root)
    assert not root.exists()
    assert sys.path[0] != str(root)
