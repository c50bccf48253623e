"""What an accepted case must equal: the same act on the valid original, or a value that was made another way."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.hostile.case import Answer, Case, Expect, Place, Reference, command

TIMES = (  # what differs from one run to the next
    (re.compile(r"(?<![\w.])\d+(\.\d+)?( ?m?s\b| seconds)"), "T"), (re.compile(r"(?m)^│ seconds .*$"), "T"),
    (re.compile(r'"[a-z_]*seconds": ?[\d.e-]+'), "T"),
    (re.compile(r'"(made|written|created|date|started|finished|time)": "[^"]*"'), "T"),
)  # fmt: skip
VOLATILE = re.compile(r"(.*/)?(events\.out.*|metrics\.csv|hparams\.yaml|\.lock|training\.png|.*\.partial)")
"""Files that hold times, or nothing."""
Files = Mapping[str, str | bytes | None]


class Result(NamedTuple):
    code: int
    said: str
    files: Mapping[str, str]


_results: dict[Any, Result] = {}
"""By what was done to which originals: they never change, and what comes of them does not either."""


def same(place: Place, words: Sequence[str], writes: Sequence[str] = (), files: Files | None = None) -> Reference:
    """The act must give what the same command gives on the originals that ``Place.copy`` put there.

    ``writes`` are paths whose files must be the same, too; ``files`` what else lies in the working folder where all is
    right, None for what does not lie there.
    """
    copies, files = list(place.copies), dict(files or {})

    def difference(answer: Answer) -> str | None:
        others = tuple(sorted((name, _digest(content)) for name, content in files.items()))
        key = tuple(words), tuple(copies), others, tuple(writes)
        if key not in _results:
            _results[key] = _twin(place, list(words), copies, files, writes)
        right = _results[key]
        if right.code != 0:
            return "the original is refused, too"
        said, wrote = neutral(answer.out, place.work), written(place.work, writes)
        if said != right.said:
            mine, theirs = said.splitlines(), right.said.splitlines()
            pairs = (f"{one!r} is not {other!r}" for one, other in zip(mine, theirs, strict=False) if one != other)
            first = next(pairs, f"{len(mine)} lines are not {len(theirs)}")
            return f"says otherwise than with the original: {first}"
        names = sorted(name for name in wrote | right.files if wrote.get(name) != right.files.get(name))
        return f"writes otherwise than with the original: {names[:4]}" if names else None

    return difference


def read_by(
    place: Place, text: str, spoilt: tuple[str, Expect], writes: Sequence[str] = (),
    compared: Sequence[str] | None = None, files: Files | None = None, anyway: Sequence[str] = (), why: str = "",
) -> Case:  # fmt: skip
    words, (what, expect) = place.words(text), spoilt
    reference = same(place, words, writes if compared is None else compared, files)
    return Case(f"{words[0]}: {what}", words, expect, writes, anyway, reference=reference, why=why)


def _twin(place: Place, words: list[str], copies: Sequence[tuple[str, str]], files: Files, writes: Sequence[str]):
    other = Place(place.root / "twin", place.pool)
    other.work.mkdir(parents=True)
    (other.root / "beside").mkdir()
    here = Path.cwd()
    try:
        for original, name in copies:
            other.copy(original, name)
        for name, content in files.items():
            path = other.path(name)
            if content is not None:
                other.write(name, content)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        os.chdir(other.work)
        answer = command(words)
        return Result(answer.code, neutral(answer.out, other.work), written(other.work, writes))
    finally:
        os.chdir(here)
        shutil.rmtree(other.root)


def neutral(text: str, work: Path) -> str:
    text = text.replace(str(work), "WORK")
    for pattern, instead in TIMES:
        text = pattern.sub(instead, text)
    return text


def written(work: Path, writes: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in writes:
        top = work / name
        for path in [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file()):
            relative = str(path.relative_to(work))
            if not VOLATILE.fullmatch(relative):
                found[relative] = content_of(path, work)
    return found


def content_of(path: Path, work: Path) -> str:
    if path.suffix == ".ckpt":
        tensors, made = torch.load(path, weights_only=True)["state_dict"], hashlib.blake2b(digest_size=16)
        for name, value in sorted(tensors.items()):
            array = value.detach().contiguous().flatten().view(torch.uint8).numpy() if value.numel() else np.zeros(0)
            made.update(f"{name} {value.dtype} {tuple(value.shape)}".encode() + array.tobytes())
        return made.hexdigest()
    content = path.read_bytes()
    try:
        return _digest(neutral(content.decode("utf-8"), work))
    except UnicodeDecodeError:
        return _digest(content)


def _digest(content: str | bytes | None) -> str:
    if content is None:
        return "gone"
    content = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def both(*references: Reference) -> Reference:
    """The first difference that any of them finds."""
    return lambda answer: next(filter(None, (each(answer) for each in references)), None)


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
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and bool(one == other)
