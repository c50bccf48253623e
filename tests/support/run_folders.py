"""Folders on disk: runs, pictures and tables as people have them, disks that are full, writers that die."""

import csv
import io
import json
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from subtoken_train.training.checkpoints import Marker, begin, seal
from subtoken_train.training.run_folder import RunFolder, RunMarker
from tests.support.commands import printed


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
    if child := os.fork():
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


def content(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def logged(run: Path, name: str) -> list[float]:
    """What a run logged by a name, step after step."""
    with (run / "logs" / "csv" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def adapter_tensors(folder: Path) -> dict[str, Tensor]:
    paths = sorted(folder.rglob("*.safetensors"))
    return {f"{path.relative_to(folder)}:{name}": each for path in paths for name, each in load_file(path).items()}


def same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(each.equal(other[name]) for name, each in one.items())


def checkpoint(folder: Path, text: str, step: int = 3) -> None:
    partial = begin(folder / "checkpoints", step)
    (partial / "state.ckpt").write_text(text)
    seal(partial, Marker(step, 1, "X", {}))


def made_run(folder: Path, text: str = "old", marked: bool = True) -> Path:
    """A finished run with two files of its user's."""
    checkpoint(folder, text)
    (folder / "logs" / "csv").mkdir(parents=True)
    (folder / "adapter").mkdir()
    for name in ("recipe.yaml", "adapter/subtoken_config.json", "logs/csv/metrics.csv", "notes.txt", "logs/mine.txt"):
        (folder / name).write_text(text)
    if marked:
        RunMarker.new().write(folder)
    return folder


def opened(folder: Path, replaces: bool = False) -> RunFolder:
    new = RunFolder(folder, replaces)
    new.check(resume=False)
    new.open(resume=False)
    return new


def begun(folder: Path) -> RunFolder:
    new = opened(folder, replaces=True)
    (folder / "recipe.yaml").write_text("new")
    return new


def states(parent: Path) -> dict[str, str]:
    return {path.parts[-4]: path.read_text() for path in sorted(parent.glob("*/checkpoints/step-3/state.ckpt"))}


def kill_in(number: int, action: Callable[[], object]) -> bool:
    """Run ``action`` in a child that dies by SIGKILL at its ``number``-th change of a folder; whether it came there."""
    done = 0

    def dying(original):
        def call(*args, **settings):
            nonlocal done
            done += 1
            if done == number:
                die()
            return original(*args, **settings)

        return call

    def run():
        for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "symlink_to"):
            setattr(Path, name, dying(getattr(Path, name)))
        action()

    return killed(run)


def encoded(picture: Image.Image, form: str = "PNG", **settings: Any) -> bytes:
    content = io.BytesIO()
    picture.save(content, form, **settings)
    return content.getvalue()


def pictures(folder: Path, count: int = 6, below: str = "images") -> list[str]:
    (folder / below).mkdir(parents=True, exist_ok=True)
    names = [f"{below}/{number:02d}.png" for number in range(count)]
    for number, name in enumerate(names):
        Image.new("RGB", (12, 12), (40 * number % 256, number, 90)).save(folder / name)
    return names


def table(folder: Path, rows: Iterable[Sequence[str]], name: str = "questions.csv", header: str = "") -> Path:
    path = folder / name
    path.write_text("\n".join([header or "image,question,answer", *(",".join(row) for row in rows)]) + "\n")
    return path


def own_images(folder: Path, count: int = 6) -> Path:
    names = pictures(folder, count)
    table(folder, [row for name in names for row in ((name, "is there a 3 ?", "yes"), (name, "list .", "none"))])
    return folder


def conversations(path: Path, count: int = 400) -> Path:
    pairs = [(("user", f"what comes after {i} ?"), ("assistant", f"{i + 1}")) for i in range(count)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in pair]} for pair in pairs]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def inits(capsys, *argv: object) -> list[str]:
    return printed(capsys, "init", *argv).splitlines()
