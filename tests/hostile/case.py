"""What a hostile case is, where it lives, and what can come of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

CANARY = "CANARY"
"""A file that only code from a hostile input makes."""


class Expect(StrEnum):
    """What the maker of a case knows of the right answer."""

    REFUSED = "refused"  # known to be invalid
    TAKEN = "taken"  # known to be valid: a control, so that refusing everything is no way out
    EITHER = "either"  # not known; all other verdicts hold


class Verdict(StrEnum):
    """What came of a case; the first of the bad ones that is true, in this order."""

    CODE = "code run"
    LOST = "lost"
    HANG = "hang"
    MEMORY = "memory"
    TRACEBACK = "traceback"
    WRONG = "wrong acceptance"
    REFUSAL = "wrong refusal"
    LEFT = "left behind"
    MESSAGE = "message"
    CLEAN = "clean"


@dataclass(frozen=True)
class Answer:
    """How a command or a function of the library ended.

    Attributes:
        code: the exit code; of a function 0, or 2 for a worded error.
        out: what went to stdout.
        err: what went to stderr; of a function the error's text.
        value: what a function returned.
    """

    code: int
    out: str = ""
    err: str = ""
    value: Any = None


@dataclass(frozen=True)
class Case:
    """One hostile input and what is done with it.

    Attributes:
        what: the mutation in words.
        act: the words of a command line, or a function of the library.
        expect: what must come of it.
        writes: paths below the working folder that the act may make or change where it is accepted; all other files
            must stay as they are.
        writes_anyway: those that it may make even where it refuses.
        moves: paths below the working folder whose files may get another place, but must not be gone.
        complaint: a further look at an accepted input: what is wrong with the answer, None if nothing is.
    """

    what: str
    act: Sequence[str] | Callable[[], Any]
    expect: Expect = Expect.EITHER
    writes: tuple[str, ...] = ()
    writes_anyway: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()
    complaint: Callable[[Answer], str | None] | None = None


@dataclass(frozen=True)
class Outcome:
    """A judged case.

    Attributes:
        name: ``class:seed``, by which it can be run again.
        what: the mutation in words.
        verdict: what came of it.
        detail: why, for verdicts other than clean.
        expect: see ``Expect``.
        code: exit code, None where it did not end.
        seconds: that it took.
    """

    name: str
    what: str
    verdict: Verdict
    detail: str
    expect: Expect
    code: int | None
    seconds: float


@dataclass(frozen=True)
class Place:
    """The folders of one case.

    Attributes:
        root: holds everything; is made anew for each case.
        pool: folder of valid originals, never changed.
    """

    root: Path
    pool: Path

    @property
    def work(self) -> Path:
        """The current folder of the act."""
        return self.root / "work"

    @property
    def canary(self) -> Path:
        """See ``CANARY``."""
        return self.root / CANARY

    def path(self, name: str) -> Path:
        """A path below the working folder, its folder made."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, content: str | bytes) -> Path:
        """Write a file below the working folder."""
        path = self.path(name)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return path

    def copy(self, original: str, name: str | None = None) -> Path:
        """Copy a file or folder of the pool into the working folder."""
        source, target = self.pool / original, self.path(name or original)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
        return target
