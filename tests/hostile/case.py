"""What a hostile case is, where it lives, and what can come of it."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

VLM, LM = "tiny_fastv25_s16k4", "tinylm_quest25_s16k12"
THEIRS = b"somebody else's, come while a case ran"
"""What ``Case.comes`` holds."""
CANARY = "CANARY"
"""A file that only code from a hostile input makes."""


class Expect(StrEnum):
    """What the maker of a case knows of the right answer."""

    REFUSED = "refused"  # known to be invalid
    TAKEN = "taken"  # known to be valid, so that refusing everything is no way out
    EITHER = "either"  # may be refused, for a reason that the case names; taken, it must still equal its reference


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
    """How a command or a function ended: a function's code is 0, or 2 for a worded error, whose text is ``err``."""

    code: int
    out: str = ""
    err: str = ""
    value: Any = None


Reference = Callable[[Answer], str | None]
"""What differs between an answer and the right one; None if nothing does."""
Spoilt = tuple[str, Expect]
"""What was done to an input, and what must come of it."""


@dataclass(frozen=True)
class Case:
    """One hostile input and what is done with it.

    No case is taken unseen: what may be taken needs a reference, and who does not know whether it is says why.

    Attributes:
        what: the mutation in words.
        act: the words of a command line, or a function of the library.
        writes: paths below the working folder that the act may change where it is accepted, and no others.
        writes_anyway: those that it may make even where it refuses.
        moves: paths below the working folder whose files may get another place, but must not be gone.
        why: the reason for which nobody knows whether the input is taken, of ``Expect.EITHER`` alone.
        says: words of which a refusal holds one, so that it was refused for what is wrong with it.
        room: bytes that a file may have while the act runs, as on a full disk; None: as many as there are.
        comes: a file that somebody else makes while the act runs, and that must stay as it came.
    """

    what: str
    act: Sequence[str] | Callable[[], Any]
    expect: Expect
    writes: Sequence[str] = ()
    writes_anyway: Sequence[str] = ()
    moves: Sequence[str] = ()
    reference: Reference | None = None
    why: str = ""
    says: tuple[str, ...] = ()
    room: int | None = None
    comes: Path | None = None

    def __post_init__(self) -> None:
        if self.expect is not Expect.REFUSED and self.reference is None:
            raise ValueError(f"{self.what}: nothing to compare an answer with")
        if (self.expect is Expect.EITHER) != bool(self.why):
            raise ValueError(f"{self.what}: a reason belongs to what is not known, and to that alone")


@dataclass(frozen=True)
class Outcome:
    """A judged case; ``name`` is ``class:seed``, by which it can be run again."""

    name: str
    what: str
    verdict: Verdict
    detail: str
    expect: Expect
    code: int | None
    seconds: float
    compared: bool = False
    why: str = ""


@dataclass(frozen=True)
class Place:
    """The folders of one case.

    Attributes:
        root: holds everything; is made anew for each case.
        pool: folder of valid originals, never changed.
        copies: what ``copy`` has put into the working folder, in order: the original and its name there.
    """

    root: Path
    pool: Path
    copies: list[tuple[str, str]] = field(default_factory=list)

    @property
    def work(self) -> Path:
        """The current folder of the act."""
        return self.root / "work"

    @property
    def canary(self) -> Path:
        return self.root / CANARY

    def words(self, text: str) -> list[str]:
        """A command line as a shell takes it, with names of originals in braces."""
        pool = self.pool
        names = {"vlm": f"adapters/{VLM}", "lm": f"adapters/{LM}", "recipe": f"{VLM}.yaml", "dev": "scenes/dev.json"}
        names |= {"llama": "backbones/tiny-llama", "png": "images/a.png", "pool": ""}
        return [word.format(**{key: str(pool / name) for key, name in names.items()}) for word in shlex.split(text)]

    def path(self, name: str) -> Path:
        """A path below the working folder, its folder made."""
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.path(name)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return path

    def copy(self, original: str, name: str | None = None) -> Path:
        """Copy a file or folder of the pool into the working folder."""
        source, target = self.pool / original, self.path(name or original)
        self.copies.append((original, name or original))
        shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
        return target
