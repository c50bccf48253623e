"""The places of a run that replaces another one, and the renaming from one to the next.

``NAME.new-1a2b3c4d`` is where it begins, ``NAME`` where it stays, ``NAME.replaced-1a2b3c4d`` where the old one waits.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from subtoken_train.documents import real_path
from subtoken_train.outputs import flush
from subtoken_train.training.checkpoints import PARTIAL, newest_complete
from subtoken_train.training.run_marker import LOCK_FILE, MARKER_FILE, RUN, lock_run, read_run_marker

_NEW, _REPLACED = ".new-", ".replaced-"
_TOKEN = re.compile(re.escape(_NEW) + "[0-9a-f]{8}")


def place_beside(folder: Path) -> Path:
    """A new name beside a run's folder for the run that is to replace it; a link is followed to the folder itself."""
    real = real_folder(folder)
    return real.with_name(f"{real.name}{_NEW}{secrets.token_hex(4)}")


def final_names(text: str, place: Path) -> str:
    """A text in which paths name the run's folder, and not the ``place`` beside it where the run begins."""
    _, mark, token = place.name.rpartition(_NEW)
    return text.replace(mark + token, "") if _TOKEN.fullmatch(mark + token) else text


def settle_after_kill(folder: Path) -> bool:
    """Let a run that was killed just when its first checkpoint stood take its place, unless somebody writes there.

    Returns:
        Whether there was one.
    """
    real, settled = real_folder(folder), False
    for place in places_beside(real):
        if place.is_symlink() or newest_complete(place / "checkpoints") is None:
            continue
        if real.exists() and read_run_marker(real) is None:  # not what was to be replaced
            continue
        locks: list[FileLock] = []
        try:
            for taken in filter(Path.exists, (place, real)):
                locks.append(lock_run(taken, 0))
            swap(place, real)
            settled = True
        except ValueError:  # somebody writes there: it is not ours to settle
            continue
        finally:
            for lock in locks:
                lock.release()
    return settled


def real_folder(folder: Path) -> Path:
    """The folder itself, where a name is a link or ends in dots."""
    return real_path(folder) if folder.is_symlink() or folder.name in ("", "..") else folder


def replaced_name(place: Path, real: Path) -> str:
    """The name that the run in ``real`` gets when the one in ``place`` takes its own."""
    return f"{real.name}{_REPLACED}{place.name.rpartition(_NEW)[2]}"


def waiting(real: Path, names: tuple[str, ...]) -> list[Path]:
    """Those of ``names`` that are old runs beside ``real`` and still there; other names lead nowhere."""
    ours = [name for name in names if name.startswith(real.name + _REPLACED) and Path(name).name == name]
    return [old for old in map(real.with_name, ours) if _is_old_run(old)]


def _is_old_run(folder: Path) -> bool:
    """Marked, or all removed but the folder itself."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return read_run_marker(folder) is not None or not any(folder.iterdir())


def _is_bare(place: Path) -> bool:
    """Whether a folder was made for a run that was killed before it could mark it."""
    begun = (MARKER_FILE + PARTIAL, f".{MARKER_FILE}.")  # of 0.1, of ``write_whole``
    return all(name == LOCK_FILE or name.startswith(begun) for name in os.listdir(place))


def places_beside(real: Path) -> Iterator[Path]:
    """Runs that began beside ``real`` to replace it, and links that such runs left."""
    names = sorted(os.listdir(real.parent)) if real.parent.is_dir() else []
    ours = [name for name in names if name.startswith(real.name) and _TOKEN.fullmatch(name.removeprefix(real.name))]
    for place in map(real.with_name, ours):
        if place.is_symlink():
            if os.readlink(place) == real.name:
                yield place
        elif place.is_dir():
            marker = read_run_marker(place)
            if _is_bare(place) if marker is None else marker.staged == place.name:
                yield place


def swap(place: Path, real: Path) -> None:
    """Rename the run in ``real`` and let the one in ``place`` take its name."""
    old = real.with_name(replaced_name(place, real))
    if there := real.exists():
        real.rename(old)
    try:
        place.rename(real)
    except OSError:
        if there:
            old.rename(real)
        raise
    flush(real.parent)
    if old.is_dir():
        carry_over(old, real)


def carry_over(old: Path, new: Path) -> None:
    """Move what no run of ours wrote from an old run's folder into the new one's, where there is room for it."""
    for item in RUN.others(old):
        target = new / item.relative_to(old)
        if not target.exists() and not target.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            item.rename(target)
