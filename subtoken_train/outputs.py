"""Files that commands write: never over what is there unless told, and whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from subtoken_train.documents import read_json

_RECORD = ".written.json"


def check_new(paths: Iterable[Path], overwrite: bool) -> None:
    """Raise a worded ``ValueError`` where one of the files is there, unless it is to be replaced."""
    for path in paths:
        if path.is_dir():
            raise ValueError(f"{path} is a folder; name a file")
        if not overwrite and (path.exists() or path.is_symlink()):
            raise ValueError(f"{path} exists; name another file, or pass --overwrite")


def write_whole(path: Path, text: str) -> None:
    """Write a text beside ``path`` under a name of its own, then give it its name; parents are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_recorded(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files into a folder and note what they hold, so that ``untouched`` knows them again."""
    for name, text in texts.items():
        write_whole(folder / name, text)
    digests = {name: _digest(text.encode()) for name, text in texts.items()}
    write_whole(folder / _RECORD, json.dumps({**_recorded(folder), **digests}, indent=1) + "\n")


def untouched(path: Path) -> bool:
    """Whether a file is as ``write_recorded`` wrote it: nobody's work is lost with it."""
    return path.is_file() and _recorded(path.parent).get(path.name) == _digest(path.read_bytes())


def _recorded(folder: Path) -> dict[str, str]:
    path = folder / _RECORD
    content = read_json(path) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
