"""A counter on stderr: in place on a terminal, a few lines in a log."""

from __future__ import annotations

import sys
from collections.abc import Callable

from subtoken_train.errors import plain

_LINES = 10  # in a log


def counter(what: str) -> Callable[[int, int], None]:
    """A function of (done, total) that shows ``done/total what``."""
    shown, what = 0, plain(what)

    def show(done: int, total: int) -> None:
        nonlocal shown
        if sys.stderr.isatty():
            print(f"\r{done}/{total} {what}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif (part := done * _LINES // total) > shown:
            shown = part
            print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

    return show
