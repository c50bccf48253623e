"""Disks that are full, writers that die, folders that are damaged: made with what every POSIX system has."""

import json
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def no_room(limit: int | None) -> Iterator[None]:
    """Let the system refuse to let any file of this process grow beyond ``limit`` bytes, as a full disk does."""
    limits, complains = resource.getrlimit(resource.RLIMIT_FSIZE), logging.raiseExceptions
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    logging.raiseExceptions = False  # of our own standard error, which may be a file, too
    resource.setrlimit(resource.RLIMIT_FSIZE, limits if limit is None else (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        logging.raiseExceptions = complains
        signal.signal(signal.SIGXFSZ, before)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(action: Callable[[], object]) -> bool:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    try:
        action()
    finally:
        os._exit(0)


def put(folder: Path, file: str, place: str, value: object) -> None:
    """Set a value, ``a.b`` being b of a; ``...`` removes it."""
    path = folder / file
    record = json.loads(path.read_text())
    *groups, key = place.split(".")
    inner = record
    for group in groups:
        inner = inner[group]
    if value is ...:
        del inner[key]
    else:
        inner[key] = value
    path.write_text(json.dumps(record))


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))
