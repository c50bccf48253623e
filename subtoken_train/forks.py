"""Undo what a call changes for its duration, after it and in a process that was forked in the middle of it.

A fork copies a model while another thread uses it, and that thread does not exist in the copy: nothing there would end
what it began.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_begun: dict[object, tuple[int, Callable[[], object]]] = {}
"""Blocks that run now: the thread of each, and what undoes it, in the order in which they began."""


@contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` at the end of the block, or at a fork by another thread in the process that is made."""
    block = object()
    _begun[block] = (threading.get_ident(), undo)
    try:
        yield
    finally:
        del _begun[block]
        undo()


@contextmanager
def changed(thing: Any, **values: Any) -> Iterator[None]:
    """Give attributes of an object other values inside the block."""

    def put(each: dict[str, Any]) -> None:
        for name, value in each.items():
            setattr(thing, name, value)

    with undoing(partial(put, {name: getattr(thing, name) for name in values})):
        put(values)
        yield


def _undo_other_threads() -> None:
    for block, (thread, undo) in reversed(list(_begun.items())):
        if thread != threading.get_ident():
            del _begun[block]
            undo()


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_undo_other_threads)
