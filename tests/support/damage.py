"""Ways to damage a folder, and what tells that its code was run."""

from __future__ import annotations

import json
import os
from pathlib import Path


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
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))
