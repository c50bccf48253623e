"""What a hostile case is, where it lives, how its act is carried out, and what it must equal where it is accepted."""

import errno
import hashlib
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

VLM, LM = "tiny_fastv25_s16k4", "tinylm_quest25_s16k12"
THEIRS = b"somebody else's, come while a case ran"  # what ``Case.comes`` holds
CANARY = "CANARY"  # a file that only code from a hostile input makes


class Expect(StrEnum):
    REFUSED = "refused"  # known to be invalid
    TAKEN = "taken"  # known to be valid, so that refusing everything is no way out


class Verdict(StrEnum):
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


Reference = Callable[[Answer], str | None]  # what differs between an answer and the right one; None if nothing does
Spoilt = tuple[str, Expect]  # what was done to an input, and what must come of it


@dataclass(frozen=True)
class Case:
    """One hostile input, and what is done with it; what is taken needs a reference. Paths are below the work folder."""

    what: str  # the mutation in words
    act: Sequence[str] | Callable[[], Any]  # the words of a command line, or a function of the library
    expect: Expect
    writes: Sequence[str] = ()  # paths that the act may change where it is accepted, and no others
    writes_anyway: Sequence[str] = ()  # those that it may make even where it refuses
    moves: Sequence[str] = ()  # those whose files may get another place, but must not be gone
    reference: Reference | None = None
    says: tuple[str, ...] = ()  # words of which a refusal holds one, so that it was refused for what is wrong with it
    room: int | None = None  # bytes that a file may have while the act runs, as on a full disk; None: what there is
    comes: Path | None = None  # a file that somebody else makes while the act runs, and that must stay as it came

    def __post_init__(self) -> None:
        if self.expect is not Expect.REFUSED and self.reference is None:
            raise ValueError(f"{self.what}: nothing to compare an answer with")


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


@dataclass(frozen=True)
class Place:
    """The folders of one case."""

    root: Path  # holds everything; is made anew for each case
    pool: Path  # valid originals, never changed
    copies: list[tuple[str, str]] = field(default_factory=list)  # by ``copy``, in order: the original, its name here

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def canary(self) -> Path:
        return self.root / CANARY

    def words(self, text: str) -> list[str]:
        pool = self.pool
        names = {"vlm": f"adapters/{VLM}", "lm": f"adapters/{LM}", "recipe": f"{VLM}.yaml", "dev": "scenes/dev.json"}
        names |= {"llama": "backbones/tiny-llama", "png": "images/a.png", "pool": ""}
        return [word.format(**{key: str(pool / name) for key, name in names.items()}) for word in shlex.split(text)]

    def path(self, name: str) -> Path:
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.path(name)
        path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
        return path

    def copy(self, original: str, name: str | None = None) -> Path:
        source, target = self.pool / original, self.path(name or original)
        self.copies.append((original, name or original))
        shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
        return target


PREFIX = "subtoken-train: "
OS_WORDS = tuple({os.strerror(number) for number in errno.errorcode})
"""What the system says of an error; alone it is no sentence of ours."""
CANARY_MODULE = "hostile_canary"  # a module on the path of every case that nobody but a hostile input imports
SOURCE = '''
"""Imported, it has run."""
class Callback:
    def __init__(self, *args, **kwargs): pass
def call(*args, **kwargs): return Callback()
'''


def install_canary(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{CANARY_MODULE}.py").write_text(SOURCE)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def command(words: Sequence[str]) -> Answer:
    from subtoken_train.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as end:  # --help
            code = end.code if isinstance(end.code, int) else 0
    return Answer(code, out.getvalue(), err.getvalue())


def call(function: Callable[[], object]) -> Answer:
    """Call a function: a plain ``ValueError`` or a worded ``OSError`` is a refusal; all else is none."""
    from subtoken_train.cli.terminal import one_line

    out = io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            value = function()
        return Answer(0, out.getvalue(), "", value)
    except (ValueError, OSError) as error:
        ours = type(error) is ValueError or type(error).__module__.startswith("subtoken_train.")
        if not (ours or (isinstance(error, OSError) and worded(error))):
            raise
        return Answer(2, "", f"{PREFIX}error: {one_line(error)}\n")  # as a command would say it


def worded(error: OSError) -> bool:
    """Whether an error of the system carries a sentence of ours, and not the system's words and a path alone."""
    text = str(error)
    return " " in text and not text.startswith("[Errno ") and not system_words(text)


def system_words(line: str) -> bool:
    return "; " not in line and any(line == words or line.startswith(f"{words}: ") for words in OS_WORDS)


TIMES = (  # what differs from one run to the next
    (re.compile(r"(?<![\w.])\d+(\.\d+)?( ?m?s\b| seconds)"), "T"), (re.compile(r"(?m)^│ seconds .*$"), "T"),
    (re.compile(r'"[a-z_]*seconds": ?[\d.e-]+'), "T"),
    (re.compile(r'"(made|written|created|date|started|finished|time)": "[^"]*"'), "T"),
)  # fmt: skip
_results: dict[Any, tuple[int, str, dict[str, str]]] = {}
"""By what was done to which originals: they never change, and what comes of them does not either."""


def same(
    place: Place, words: Sequence[str], writes: Sequence[str] = (), files: Mapping[str, bytes] | None = None
) -> Reference:
    """Demand of the act what it does on the originals; ``writes``: files, too, ``files``: what else lies there."""
    copies, files = list(place.copies), dict(files or {})

    def difference(answer: Answer) -> str | None:
        key = tuple(words), tuple(copies), tuple(writes), tuple(files.items())
        if key not in _results:
            _results[key] = _twin(place, words, copies, files, writes)
        code, right, wrote = _results[key]
        if code != 0:
            return "the original is refused, too"
        said, made = neutral(answer.out, place.work), written(place.work, writes)
        pairs = zip_longest(said.splitlines(), right.splitlines())
        if other := [f"{one!r} is not {two!r}" for one, two in pairs if one != two]:
            return f"says otherwise than with the original: {other[0]}"
        names = sorted(name for name in made | wrote if made.get(name) != wrote.get(name))
        return f"writes otherwise than with the original: {names[:4]}" if names else None

    return difference


LORA, ROUTER = "adapter_model.safetensors", "router.safetensors"
TENSORS = (f"run/adapter/{LORA}", f"run/adapter/{ROUTER}")
WRITES: dict[str, tuple[Sequence[str], Sequence[str]]] = {  # what a command may write, and what of it is compared
    "export": (("out",), (f"out/{LORA}", f"out/{ROUTER}")), "fit": (("run",), TENSORS),
    "report": (("tables",), ("tables",)), "init": (("mine_subtoken",),) * 2, "evaluate": (("results",),) * 2,
    "generate": (("out.jsonl", "out.jsonl.records"), ("out.jsonl",)),
}  # fmt: skip


def read_by(place: Place, text: str, spoilt: Spoilt) -> Case:
    """A command on what was spoilt; taken, it must say and write what it does on the originals."""
    words, (what, expect) = place.words(text), spoilt
    writes, compared = WRITES.get(words[0], ((), ()))
    anyway = ("run/logs", "run/.lock", "run.lock") if "--resume" in words else ()
    return Case(f"{words[0]}: {what}", words, expect, writes, anyway, reference=same(place, words, compared))


def _twin(
    place: Place, words: Sequence[str], copies: Sequence[tuple[str, str]], files: Mapping[str, bytes],
    writes: Sequence[str],
) -> tuple[int, str, dict[str, str]]:  # fmt: skip
    other, here = Place(place.root / "twin", place.pool), Path.cwd()
    other.write("../beside/notes.txt", "")
    try:
        for original, name in copies:
            other.copy(original, name)
        for name, content in files.items():
            other.write(name, content)
        os.chdir(other.work)
        answer = command(words)
        return answer.code, neutral(answer.out, other.work), written(other.work, writes)
    finally:
        os.chdir(here)
        shutil.rmtree(other.root)


def neutral(text: str, work: Path) -> str:
    text = text.replace(str(work), "WORK")
    for pattern, instead in TIMES:
        text = pattern.sub(instead, text)
    return text


def written(work: Path, writes: Sequence[str]) -> dict[str, str]:
    paths = [path for top in [work / name for name in writes] for path in (top, *top.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(work)): content_of(path, work)
        for path in paths
        if path.name != ".lock" and path.suffix != ".partial"
    }


def content_of(path: Path, work: Path) -> str:
    content = path.read_bytes()
    with suppress(UnicodeDecodeError):
        content = neutral(content.decode("utf-8"), work).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def made(compute: Callable[[], Any]) -> Reference:
    """What the function returned must equal what is computed another way."""

    def difference(answer: Answer) -> str | None:
        got, right = answer.value, compute()
        return None if alike(got, right) else f"{str(got)[:200]} is not {str(right)[:200]}"

    return difference


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and bool(one == other)
