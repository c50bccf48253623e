"""A counter on stderr, in place."""

from __future__ import annotations

import sys
from collections.abc import Callable


def counter(what: str) -> Callable[[int, int], None]:
    """A function of (done, total) that shows ``done/total what``."""

    def show(done: int, total: int) -> None:
        print(f"\r{done}/{total} {what}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show
