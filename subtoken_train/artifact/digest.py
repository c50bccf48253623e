"""What an adapter folder holds, as one number: two trainings never have the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

_FILES = ("*.json", "*.safetensors")
"""What a model is made of; the card and the recipe beside it may be written anew."""


def adapter_digest(folder: Path) -> str:
    """SHA-256 of an adapter folder's settings and tensors, in hexadecimal; the same wherever the folder lies.

    A merged folder's whole weights are read.
    """
    paths = sorted(
        (path.relative_to(folder).as_posix(), path) for kind in _FILES for path in folder.rglob(kind) if path.is_file()
    )
    digest = hashlib.sha256()
    for name, path in paths:
        with path.open("rb") as file:
            digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
