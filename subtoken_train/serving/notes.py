"""Warnings by the thread that gives them: the answers have one, and every request that is read another."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from subtoken_train.errors import SubTokenWarning

_own = threading.local()
_before: list[Callable[..., Any]] = [warnings.showwarning]


@contextmanager
def noted() -> Iterator[list[str]]:
    """Collect what the library warns of in this thread, inside the block."""
    warnings.simplefilter("always", SubTokenWarning)
    if warnings.showwarning is not _note:
        _before[0], warnings.showwarning = warnings.showwarning, _note
    _own.notes = []
    try:
        yield _own.notes
    finally:
        _own.notes = None


def _note(message: Warning | str, category: type[Warning], *place: Any, **further: Any) -> None:
    notes = getattr(_own, "notes", None)
    if notes is not None and issubclass(category, SubTokenWarning):
        notes.append(str(message))
    else:
        _before[0](message, category, *place, **further)
