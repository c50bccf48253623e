"""Files that this package writes: never over what is there unless told, and whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def check_new(paths: Iterable[Path], overwrite: bool) -> None:
    """Raise a worded ``ValueError`` where one of the files is there, unless it is to be replaced."""
    for path in paths:
        if path.is_dir():
            raise ValueError(f"{path} is a folder; name a file")
        if not overwrite and (path.exists() or path.is_symlink()):
            raise ValueError(f"{path} exists; name another file, or pass --overwrite")


def write_whole(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file (a text in UTF-8) whole or not at all, see ``whole_file``."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A new file beside ``path`` under a name of its own, to be written; it then gets its name. Parents are made.

    Once the block has ended it is on the disk; a link that lies at ``path`` is replaced, not followed. After an error
    it is gone, and what was at ``path`` is there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.touch(exist_ok=False)
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
