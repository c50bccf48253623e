"""Worded errors for users' mistakes, warnings, and nearest-name suggestions.

``ValueError`` is what the library raises for wrong input; the command line turns it into one short message and exit
code 2. ``assert`` is kept for invariants.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SubTokenWarning(UserWarning):
    """What a user should know of a result that is given all the same; the command line says it on one line."""


def unknown_name(kind: str, got: object, allowed: Iterable[str]) -> ValueError:
    """The error for a name that is not in a registry: what was got, the nearest name, what is allowed."""
    names = sorted(allowed)
    nearest = difflib.get_close_matches(str(got), names, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"unknown {kind} {got!r}.{hint} Allowed: {', '.join(names)}")
