"""A module that nobody but a hostile input imports: ``hostile_canary``, on the path of every case."""

from __future__ import annotations

import sys
from pathlib import Path

NAME = "hostile_canary"
SOURCE = '''
"""Imported, it has run."""
import pathlib
class Callback:
    def __init__(self, *args, **kwargs): pass
def call(*args, **kwargs): return Callback()
'''


def install(folder: Path) -> None:
    """Put the module where ``import`` finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.py").write_text(SOURCE)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def forget() -> None:
    """As if it had never been imported."""
    sys.modules.pop(NAME, None)


def imported() -> bool:
    """Whether anything has imported it since ``forget``."""
    return NAME in sys.modules
