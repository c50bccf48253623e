"""Watches over a case: seconds, memory, processes started, files written anywhere."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tests.hostile.case import THEIRS

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
    """What is seen of a case.

    Attributes:
        started: programs that it would have started.
        touched: paths that it wrote, in order; what libraries in other languages write is seen in the folders alone.
        forks: processes that it forked.
        comes: a file that is made once it writes; None: none, or it is there.
        ended: what ended threads of its own.
    """

    started: list[str] = field(default_factory=list)
    touched: list[Touch] = field(default_factory=list)
    forks: int = 0
    comes: Path | None = None
    ended: list[str] = field(default_factory=list)


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
        watch.comes.write_bytes(THEIRS)
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
    """Stop what runs inside once it takes too long or too much; note what it starts and writes.

    The clock counts processor time, so that a busy machine makes no hang, and wall time with a wide margin.
    """
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
