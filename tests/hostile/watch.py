"""Watches over a case: seconds, memory, processes started, modules imported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SECONDS = 5.0
"""Of processor time; ten times what the slowest valid original takes."""
STUCK = 6.0
"""Wall seconds with next to no processor time: it waits for a pipe or a lock."""
WALL_FACTOR = 12
"""Wall seconds for one processor second, before a case that sleeps now and then counts as hanging."""
MEMORY = 2**30
"""Bytes that a case may add."""
_TICK = 0.25
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STARTS = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn", "os.startfile"}
FORKS = 32
"""Processes that a case may fork: a data loader's workers, not a million of them."""
_OURS = ("uname",)
"""What ``env`` asks for the platform's name."""
_started: list[str] = []
_forks = 0
_listening = False


class Stopped(BaseException):
    """A case took too long or too much; no ``except Exception`` holds it."""

    def __init__(self, memory: int | None = None) -> None:
        super().__init__("too much memory" if memory else "too long")
        self.memory = memory


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Python tells every program that is started before it is: it is noted, and not started."""
    global _forks  # noqa: PLW0603
    if not _listening:
        return
    if event in _STARTS and arguments[0] not in _OURS:
        _started.append(f"{event} {str(arguments)[:200]}")
        raise PermissionError("a hostile input may start no program")
    if event == "os.fork":
        _forks += 1
        if _forks > FORKS:
            raise _stopped()


def _stopped(memory: int | None = None) -> Stopped:
    """The exception, once nobody can wait for a worker any more."""
    for child in multiprocessing.active_children():
        child.kill()
    return Stopped(memory)


sys.addaudithook(_audit)


def resident() -> int:
    """Bytes of memory that this process holds now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE


def peak() -> int:
    """The most that it held since ``forget_peak``."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def forget_peak() -> None:
    """Start counting anew."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


@contextmanager
def watched() -> Iterator[list[str]]:
    """Stop what runs inside once it takes too long or too much; yields the list of processes that it started.

    The clock counts processor time, so that a busy machine makes no hang, and wall time with a wide margin.

    Raises:
        Stopped: from inside.
    """
    global _listening, _forks  # noqa: PLW0603
    clock, wall, held = time.process_time(), time.monotonic(), resident()
    _started.clear()
    _forks = 0
    forget_peak()

    def look(number: int, frame: FrameType | None) -> None:
        if (grown := peak() - held) > MEMORY:  # what was taken and given back at once counts too
            raise _stopped(grown)
        used, passed = time.process_time() - clock, time.monotonic() - wall
        if used > SECONDS or passed > SECONDS * WALL_FACTOR or (passed > STUCK and used < passed / 50):
            raise _stopped()

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _TICK, _TICK)
    _listening = True
    try:
        yield _started
        grown = peak() - held
        if grown > MEMORY:
            raise Stopped(grown)
    finally:
        _listening = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
