"""Runs on disk: made without training, and what the folders of trained ones hold."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from subtoken_train.training.checkpoints import Marker, begin, seal
from subtoken_train.training.run_folder import RunFolder, new_marker, place_beside, write_run_marker


def content(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder, by its path there."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of an adapter folder: LoRA and routers, by file and name."""
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
        write_run_marker(folder, new_marker())
    return folder


def begun(folder: Path) -> RunFolder:
    """A run that is to replace the one in ``folder``."""
    new = RunFolder(folder, place_beside(folder))
    new.check(resume=False)
    new.open(resume=False)
    (new.place / "recipe.yaml").write_text("new")
    return new


def states(parent: Path) -> dict[str, str]:
    """Every run's folder below ``parent`` and what its checkpoint holds."""
    found = sorted(parent.glob("*/checkpoints/step-3/state.ckpt"))
    return {path.parts[-4]: path.read_text() for path in found if not (parent / path.parts[-4]).is_symlink()}


def complete(new: RunFolder) -> list[str]:
    """From the first checkpoint of a run to its end."""
    checkpoint(new.place, "new")
    new.take_place()
    (new.place / "logs").mkdir(exist_ok=True)  # a logger that opens its files by the first name
    (new.place / "logs" / "later.txt").write_text("new")
    (new.folder / "adapter").mkdir()
    (new.folder / "adapter" / "subtoken_config.json").write_text("new")
    return new.finish()


def kill_in(number: int, action: Callable[[], object]) -> bool:
    """Run ``action`` in a child that dies by SIGKILL at its ``number``-th change of a folder; whether it came there."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    done = 0

    def dying(original):
        def call(*args, **settings):
            nonlocal done
            done += 1
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **settings)

        return call

    try:
        for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "symlink_to"):
            setattr(Path, name, dying(getattr(Path, name)))
        action()
    finally:
        os._exit(0)
