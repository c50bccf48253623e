"""Runs one case in this process and judges what came of it."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import stat
import sys
import tempfile
import time
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import datasets

from tests.hostile.case import (
    CANARY,
    CANARY_MODULE,
    PREFIX,
    THEIRS,
    Answer,
    Case,
    Expect,
    Outcome,
    Place,
    Verdict,
    call,
    command,
    system_words,
)
from tests.hostile.watch import Stopped, Touch, Watch, watched
from tests.support.faults import no_room

LIMIT = 400  # characters of a message
PYTHON_WORDS = (  # what stands in a message that nobody worded
    "codec can't", "NoneType", "has no attribute", "unhashable", "<class '", "Traceback", " object at 0x",
    "not subscriptable", "unsupported operand", "[Errno ", "not iterable", "unexpected keyword argument",
    "positional argument", "invalid literal for int", "could not convert string to float", "<function ",
)  # fmt: skip
AFTERWARDS = re.compile(r"no checkpoint was written; start again with the same command; its logs: \S+")
"""What a training that had begun says behind its error."""
PROGRESS = re.compile(r"[\d,]+/[\d,]+ .*|resuming from .*|.* of the text is unknown to the tokenizer .*|")
"""What a command says on stderr while it works."""
NO_FILES = ("/dev/null", "/dev/tty", "/dev/shm/", "/proc/self/", "/dev/fd/")  # where a write is none to a disk
TABLES = "datasets-cache"
"""Beside the case's folder: what the library ``datasets`` keeps of tables that it read; else in the user's cache."""
WORKERS = "pymp-"  # folders that Python keeps for its workers until the process ends
ACTS = ("Cc", "Cf", "Cs", "Zl", "Zp")  # kinds of characters that act, or show nothing
HIDDEN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
"""Warnings that Python shows to nobody unless asked to."""
Make = Callable[[random.Random, Place], Case]


def run_case(name: str, make: Make, seed: int, place: Place) -> Outcome:
    shutil.rmtree(place.root, ignore_errors=True)
    place.work.mkdir(parents=True)
    place.write("diary.txt", "mine\n")
    place.write("../beside/notes.txt", "a year of work\n")
    home = Path.cwd()
    try:
        with own_places(place):
            return _judged_case(f"{name}:{seed}", make, place, home)
    finally:
        os.chdir(home)
        for folder, _, _ in os.walk(place.root):
            os.chmod(folder, 0o700)
        shutil.rmtree(place.root)
        assert not place.root.exists()
        assert sys.path[0] != str(place.root)


def _judged_case(name: str, make: Make, place: Place, home: Path) -> Outcome:
    case = make(random.Random(name), place)
    before = snapshot(place.root)
    passing = set(os.listdir(tempfile.gettempdir()))
    os.chdir(place.work)
    clock = time.monotonic()
    answer, touched, verdict, detail = _run(case)
    seconds = time.monotonic() - clock
    os.chdir(home)
    found = [(verdict, detail), *_harm(case, place, before, answer), *_outside(touched, place)]
    left = [name for name in os.listdir(tempfile.gettempdir()) if name not in passing and not name.startswith(WORKERS)]
    if left:
        found.append((Verdict.LEFT, f"left {sorted(left)[:3]} among the temporary files"))
    if verdict is Verdict.CLEAN and answer is not None:
        found.append(compared(case, answer))
    order = list(Verdict)
    verdict, detail = min(found, key=lambda each: order.index(each[0]))
    code = None if answer is None else answer.code
    taken = code == 0 and case.reference is not None
    return Outcome(name, case.what, verdict, detail, case.expect, code, seconds, taken, case.why)


@contextmanager
def own_places(place: Place) -> Iterator[None]:
    home, passing = os.environ.get("HOME"), tempfile.tempdir
    (place.root / "home").mkdir()
    (place.root.parent / TABLES).mkdir(exist_ok=True)
    datasets.config.HF_DATASETS_CACHE = place.root.parent / TABLES
    temporary = place.root.parent / "tmp"  # stays: a process keeps what it has there for its workers until it ends
    temporary.mkdir(exist_ok=True)
    os.environ["HOME"], tempfile.tempdir = str(place.root / "home"), str(temporary)
    try:
        yield
    finally:
        tempfile.tempdir = passing
        os.environ.pop("HOME") if home is None else os.environ.update(HOME=home)


def _run(case: Case) -> tuple[Answer | None, Sequence[Touch], Verdict, str]:
    sys.modules.pop(CANARY_MODULE, None)
    watch = Watch(comes=case.comes)
    try:
        with no_room(case.room), watched(watch), warnings.catch_warnings():
            warnings.simplefilter("default")
            for hidden in HIDDEN:
                warnings.simplefilter("ignore", hidden)
            answer = command(case.act) if isinstance(case.act, list | tuple) else call(case.act)
    except Stopped as stopped:
        where = traceback.format_exc(limit=-3)
        verdict = Verdict.HANG if stopped.memory is None else Verdict.MEMORY
        return None, watch.touched, verdict, f"{stopped} {stopped.memory or ''} {where}"
    except KeyboardInterrupt:  # ours
        raise
    except BaseException:  # a panic of a library in Rust, too
        return None, watch.touched, Verdict.TRACEBACK, traceback.format_exc(limit=-6)
    if watch.ended:
        return answer, watch.touched, Verdict.TRACEBACK, f"threads ended: {watch.ended}"
    if watch.started:
        return answer, watch.touched, Verdict.CODE, f"started {watch.started}"
    return answer, watch.touched, *judged(case, answer)


def judged(case: Case, answer: Answer) -> tuple[Verdict, str]:
    if answer.code not in (0, 2):
        return Verdict.TRACEBACK, f"exit code {answer.code}: {answer.err[-1500:]}"
    if answer.code == 0 and case.expect is Expect.REFUSED:
        return Verdict.WRONG, f"accepted: {answer.out[-200:]}"
    if answer.code == 2 and case.expect is Expect.TAKEN:
        return Verdict.REFUSAL, answer.err[:600]
    if answer.code == 0:
        fault = control_characters(answer.out + answer.err)
    else:
        fault = message_fault(answer.err) or control_characters(answer.out)
        if fault is None and case.says and not any(word.lower() in answer.err.lower() for word in case.says):
            fault = f"says nothing of {case.says}: {answer.err[-LIMIT:]}"
    return (Verdict.CLEAN, "") if fault is None else (Verdict.MESSAGE, fault)


def compared(case: Case, answer: Answer) -> tuple[Verdict, str]:
    if answer.code != 0:
        return Verdict.CLEAN, ""
    if case.reference is None:
        return Verdict.WRONG, "accepted, and there is nothing to compare it with"
    try:
        fault = case.reference(answer)
    except Exception:
        return Verdict.WRONG, f"the reference takes no such input: {traceback.format_exc(limit=-3)}"
    return (Verdict.CLEAN, "") if fault is None else (Verdict.WRONG, fault)


def message_fault(err: str) -> str | None:
    lines = err.split("\n")
    if lines[-1]:
        return f"does not end with a newline: {err[-200:]!r}"
    if len(lines) > 2 and AFTERWARDS.fullmatch(lines[-2]):
        del lines[-2]
    *earlier, last = lines[:-1] or [""]
    if not last.startswith(f"{PREFIX}error: ") or " " not in last.removeprefix(f"{PREFIX}error: "):
        return f"no error line: {err[-600:]!r}"
    if strange := [line for line in earlier if not (line.startswith(f"{PREFIX}warning: ") or PROGRESS.fullmatch(line))]:
        return f"{len(strange)} more lines: {strange[0][:300]!r}"
    words = last.removeprefix(f"{PREFIX}error: ")
    if len(words) > LIMIT:
        return f"{len(words)} characters: {words[:600]}"
    if found := [word for word in PYTHON_WORDS if word in words]:
        return f"Python's words {found}: {words}"
    return f"the system's words alone: {words}" if system_words(words) else control_characters(words)


def control_characters(text: str) -> str | None:
    bad = {letter for letter in text if unicodedata.category(letter) in ACTS and letter not in "\n\t\r\u200c\u200d"}
    return f"control characters {sorted(bad)} in {text[-300:]!r}" if bad else None


def _harm(case: Case, place: Place, before: Mapping[str, str], answer: Answer | None) -> Iterator[tuple[Verdict, str]]:
    if CANARY_MODULE in sys.modules or any(place.root.rglob(f"{CANARY}*")):
        yield Verdict.CODE, "the canary was touched"
    after = snapshot(place.root)
    if case.comes is not None and (not case.comes.is_file() or case.comes.read_bytes() != THEIRS):
        yield Verdict.LOST, f"{case.comes.name}, which came while it ran, is gone or changed"
    accepted = answer is not None and answer.code == 0
    may = [f"work/{name}" for name in (*case.writes_anyway, *(case.writes if accepted else ()))]
    may += [f"work/{case.comes.name}"] if case.comes is not None else []
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


def _outside(touched: Sequence[Touch], place: Place) -> Iterator[tuple[Verdict, str]]:
    """What it did to files that are not below the case's folder; what was made in passing and has gone is nothing."""
    made = set()
    for path, kind, was_there in touched:
        if kind == "os.mkdir" and was_there:  # which changes nothing
            continue
        own = f"{place.root}/", f"{place.root.parent}/{TABLES}/", f"{tempfile.gettempdir()}/{WORKERS}", *NO_FILES
        if path.startswith(own):
            continue
        if not was_there:
            made.add(path)
        elif path not in made:
            yield Verdict.LOST, f"{kind} {path}, which is not the case's"
    if left := sorted(path for path in made if os.path.lexists(path)):
        yield Verdict.LEFT, f"made {left[:3]} outside of the case's folder"


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
