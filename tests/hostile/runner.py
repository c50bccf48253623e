"""Runs one case in this process under watch (seconds, memory, programs, files written anywhere) and judges it."""

import hashlib
import multiprocessing
import os
import random
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import datasets

from tests.hostile import case as hostile
from tests.support.run_folders import no_room

SECONDS = 5.0  # of processor time; ten times what the slowest valid original takes
STUCK = 6.0  # wall seconds with next to no processor time: it waits for a pipe or a lock
WALL_FACTOR = 12  # wall seconds for one processor second, before a case that sleeps now and then counts as hanging
MEMORY = 2**30  # bytes that a case may add
_TICK = 0.25
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STARTS = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn", "os.startfile"}
FORKS = 32  # processes that a case may fork: a data loader's workers, not a million of them
_OURS = ("uname",)  # what ``env`` asks for the platform's name
Touch = tuple[str, str, bool]  # a path that is written, what is done to it, and whether it was there before
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_UNNAMED = os.O_TMPFILE
"""Opens a file without a name in a folder that exists, which itself stays as it is (filelock 4.3 and newer)."""
_OF_PATHS = {  # events of Python that change a path, and which of their arguments it is
    "os.mkdir": (0,), "os.rmdir": (0,), "os.remove": (0,), "os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,),
    "os.truncate": (0,), "os.chmod": (0,), "os.chown": (0,), "os.utime": (0,), "os.setxattr": (0,),
    "shutil.rmtree": (0,),
}  # fmt: skip
_FOLDERS = {"os.mkdir": 2, "os.rmdir": 1, "os.remove": 1, "os.rename": 2, "os.link": 3, "os.symlink": 2, "os.chmod": 2}
"""Where such an event names the folder, as a number, that a path is in."""


@dataclass
class Watch:
    """What is seen of a case; what libraries in other languages write is seen in the folders alone."""

    started: list[str] = field(default_factory=list)  # programs that it would have started
    touched: list[Touch] = field(default_factory=list)  # paths that it wrote, in order
    forks: int = 0
    comes: Path | None = None  # a file that is made once it writes; None: none, or it is there
    ended: list[str] = field(default_factory=list)  # what ended threads of its own


_watch: Watch | None = None


class Stopped(BaseException):
    """A case took too long or too much; no ``except Exception`` holds it."""

    def __init__(self, memory: int | None = None) -> None:
        super().__init__("too much memory" if memory else "too long")
        self.memory = memory


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Python tells every program that is started before it is: it is noted, and not started; writes are noted."""
    if _watch is None:
        return
    if event in _STARTS and arguments[0] not in _OURS:
        _watch.started.append(f"{event} {str(arguments)[:200]}")
        raise PermissionError("a hostile input may start no program")
    if event == "os.fork":
        _watch.forks += 1
        if _watch.forks > FORKS:
            raise _stopped()
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        nameless = arguments[2] & _UNNAMED == _UNNAMED
        _note(event, os.path.join(os.fsdecode(arguments[0]), "unnamed") if nameless else arguments[0], None)
    elif event in _OF_PATHS:
        for index, place in enumerate(_OF_PATHS[event]):
            folder = _FOLDERS.get(event)
            where = None if folder is None else arguments[min(folder + index, len(arguments) - 1)]
            _note(event, arguments[place], where)


def _note(event: str, path: Any, folder: Any) -> None:
    global _watch
    assert _watch is not None
    if _watch.comes is not None:
        watch, _watch = _watch, None
        watch.comes.write_bytes(hostile.THEIRS)
        watch.comes, _watch = None, watch
    try:
        path = os.fsdecode(path)
        if isinstance(folder, int) and folder >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
        path = os.path.abspath(path)
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        _watch.touched.append((path, event, os.path.lexists(path)))
    except (TypeError, ValueError, OSError):  # a number of an open file, whose opening was seen; no path at all
        return


def _stopped(memory: int | None = None) -> Stopped:
    for child in multiprocessing.active_children():
        child.kill()
    return Stopped(memory)


sys.addaudithook(_audit)


def peak() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Stop what takes too long (in processor time, as machines may be busy) or too much; note its starts and writes."""
    global _watch  # noqa: PLW0603
    clock, wall = time.process_time(), time.monotonic()
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[1]) * _PAGE
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")

    def look(number: int, frame: FrameType | None) -> None:
        if (grown := peak() - held) > MEMORY:  # what was taken and given back at once counts too
            raise _stopped(grown)
        used, passed = time.process_time() - clock, time.monotonic() - wall
        if used > SECONDS or passed > SECONDS * WALL_FACTOR or (passed > STUCK and used < passed / 50):
            raise _stopped()

    hook = threading.excepthook
    threading.excepthook = lambda end: watch.ended.append(f"{end.thread}: {end.exc_value!r}")
    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _TICK, _TICK)
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    _watch = watch
    try:
        yield
        if (grown := peak() - held) > MEMORY:
            raise Stopped(grown)
    finally:
        _watch = None
        sys.dont_write_bytecode = bytecode
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        threading.excepthook = hook


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
Make = Callable[[random.Random, hostile.Place], hostile.Case]


def run_case(name: str, make: Make, seed: int, place: hostile.Place) -> hostile.Outcome:
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


def _judged_case(name: str, make: Make, place: hostile.Place, home: Path) -> hostile.Outcome:
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
        found.append((hostile.Verdict.LEFT, f"left {sorted(left)[:3]} among the temporary files"))
    if verdict is hostile.Verdict.CLEAN and answer is not None:
        found.append(compared(case, answer))
    order = list(hostile.Verdict)
    verdict, detail = min(found, key=lambda each: order.index(each[0]))
    code = None if answer is None else answer.code
    taken = code == 0 and case.reference is not None
    return hostile.Outcome(name, case.what, verdict, detail, case.expect, code, seconds, taken)


@contextmanager
def own_places(place: hostile.Place) -> Iterator[None]:
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


def _run(case: hostile.Case) -> tuple[hostile.Answer | None, Sequence[Touch], hostile.Verdict, str]:
    sys.modules.pop(hostile.CANARY_MODULE, None)
    watch = Watch(comes=case.comes)
    try:
        with no_room(case.room), watched(watch), warnings.catch_warnings():
            warnings.simplefilter("default")
            for hidden in HIDDEN:
                warnings.simplefilter("ignore", hidden)
            answer = hostile.command(case.act) if isinstance(case.act, list | tuple) else hostile.call(case.act)
    except Stopped as stopped:
        where = traceback.format_exc(limit=-3)
        verdict = hostile.Verdict.HANG if stopped.memory is None else hostile.Verdict.MEMORY
        return None, watch.touched, verdict, f"{stopped} {stopped.memory or ''} {where}"
    except KeyboardInterrupt:  # ours
        raise
    except BaseException:  # a panic of a library in Rust, too
        return None, watch.touched, hostile.Verdict.TRACEBACK, traceback.format_exc(limit=-6)
    if watch.ended:
        return answer, watch.touched, hostile.Verdict.TRACEBACK, f"threads ended: {watch.ended}"
    if watch.started:
        return answer, watch.touched, hostile.Verdict.CODE, f"started {watch.started}"
    return answer, watch.touched, *judged(case, answer)


def judged(case: hostile.Case, answer: hostile.Answer) -> tuple[hostile.Verdict, str]:
    if answer.code not in (0, 2):
        return hostile.Verdict.TRACEBACK, f"exit code {answer.code}: {answer.err[-1500:]}"
    if answer.code == 0 and case.expect is hostile.Expect.REFUSED:
        return hostile.Verdict.WRONG, f"accepted: {answer.out[-200:]}"
    if answer.code == 2 and case.expect is hostile.Expect.TAKEN:
        return hostile.Verdict.REFUSAL, answer.err[:600]
    if answer.code == 0:
        fault = control_characters(answer.out + answer.err)
    else:
        fault = message_fault(answer.err) or control_characters(answer.out)
        if fault is None and case.says and not any(word.lower() in answer.err.lower() for word in case.says):
            fault = f"says nothing of {case.says}: {answer.err[-LIMIT:]}"
    return (hostile.Verdict.CLEAN, "") if fault is None else (hostile.Verdict.MESSAGE, fault)


def compared(case: hostile.Case, answer: hostile.Answer) -> tuple[hostile.Verdict, str]:
    if answer.code != 0:
        return hostile.Verdict.CLEAN, ""
    if case.reference is None:
        return hostile.Verdict.WRONG, "accepted, and there is nothing to compare it with"
    try:
        fault = case.reference(answer)
    except Exception:
        return hostile.Verdict.WRONG, f"the reference takes no such input: {traceback.format_exc(limit=-3)}"
    return (hostile.Verdict.CLEAN, "") if fault is None else (hostile.Verdict.WRONG, fault)


def message_fault(err: str) -> str | None:
    lines = err.split("\n")
    if lines[-1]:
        return f"does not end with a newline: {err[-200:]!r}"
    if len(lines) > 2 and AFTERWARDS.fullmatch(lines[-2]):
        del lines[-2]
    *earlier, last = lines[:-1] or [""]
    if not last.startswith(f"{hostile.PREFIX}error: ") or " " not in last.removeprefix(f"{hostile.PREFIX}error: "):
        return f"no error line: {err[-600:]!r}"
    if strange := [
        line for line in earlier if not (line.startswith(f"{hostile.PREFIX}warning: ") or PROGRESS.fullmatch(line))
    ]:
        return f"{len(strange)} more lines: {strange[0][:300]!r}"
    words = last.removeprefix(f"{hostile.PREFIX}error: ")
    if len(words) > LIMIT:
        return f"{len(words)} characters: {words[:600]}"
    if found := [word for word in PYTHON_WORDS if word in words]:
        return f"Python's words {found}: {words}"
    return f"the system's words alone: {words}" if hostile.system_words(words) else control_characters(words)


def control_characters(text: str) -> str | None:
    bad = {letter for letter in text if unicodedata.category(letter) in ACTS and letter not in "\n\t\r\u200c\u200d"}
    return f"control characters {sorted(bad)} in {text[-300:]!r}" if bad else None


def _harm(
    case: hostile.Case, place: hostile.Place, before: Mapping[str, str], answer: hostile.Answer | None
) -> Iterator[tuple[hostile.Verdict, str]]:
    if hostile.CANARY_MODULE in sys.modules or any(place.root.rglob(f"{hostile.CANARY}*")):
        yield hostile.Verdict.CODE, "the canary was touched"
    after = snapshot(place.root)
    if case.comes is not None and (not case.comes.is_file() or case.comes.read_bytes() != hostile.THEIRS):
        yield hostile.Verdict.LOST, f"{case.comes.name}, which came while it ran, is gone or changed"
    accepted = answer is not None and answer.code == 0
    may = [f"work/{name}" for name in (*case.writes_anyway, *(case.writes if accepted else ()))]
    may += [f"work/{case.comes.name}"] if case.comes is not None else []
    moved = [f"work/{name}" for name in case.moves]
    kept = set(after.values())
    for name, content in before.items():
        if after.get(name) == content or _below(name, may):
            continue
        if not _below(name, moved) or content not in kept:
            yield hostile.Verdict.LOST, f"{name} is {'gone' if name not in after else 'changed'}"
    new = [name for name in after if name not in before and not _below(name, may) and not _below(name, moved)]
    if new:
        words = "" if answer is None or accepted else f" ({answer.err.strip()[-160:]})"
        yield hostile.Verdict.LEFT, f"made {new[:3]}{words}"


def _outside(touched: Sequence[Touch], place: hostile.Place) -> Iterator[tuple[hostile.Verdict, str]]:
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
            yield hostile.Verdict.LOST, f"{kind} {path}, which is not the case's"
    if left := sorted(path for path in made if os.path.lexists(path)):
        yield hostile.Verdict.LEFT, f"made {left[:3]} outside of the case's folder"


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
