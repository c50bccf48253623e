"""Compressed contexts that wait for the next question about them: in memory up to a budget, and saved ones by name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path

from subtoken_train.documents import check_file_name
from subtoken_train.inference.compressed_context import CompressedContext

SUFFIX = ".safetensors"


class ContextStore:
    """Holds contexts, and lets the least recently used ones go when they take more than a budget.

    One thread takes; others may read the counts.

    Args:
        budget: bytes of all that are held, as their reports count them. One that is larger is used once and not held.
        folder: of saved contexts, ``NAME.safetensors``; None: there are none.

    Attributes:
        taken: how many were compressed or loaded.
        found: how often one was there.
        nbytes: of those that are held.
    """

    def __init__(self, budget: int, folder: Path | None = None) -> None:
        self.budget, self.folder = budget, folder
        self.taken = self.found = self.nbytes = 0
        self._held: OrderedDict[Hashable, CompressedContext] = OrderedDict()

    def __len__(self) -> int:
        """Return how many contexts are held."""
        return len(self._held)

    def take(self, key: Hashable, make: Callable[[], CompressedContext]) -> tuple[CompressedContext, bool]:
        """Return the context of a key, and whether it was there; else ``make`` makes it."""
        if key in self._held:
            self._held.move_to_end(key)
            self.found += 1
            return self._held[key], True
        context = make()
        self.taken += 1
        size = context.report.total_bytes
        if size <= self.budget:
            while self.nbytes + size > self.budget:
                _, gone = self._held.popitem(last=False)
                self.nbytes -= gone.report.total_bytes
            self._held[key] = context
            self.nbytes += size
        return context, False

    def saved(self, name: str) -> Path | None:
        """Return the file of a saved context; None where there is none of that name."""
        check_file_name(name, "context")
        path = None if self.folder is None else self.folder / f"{name}{SUFFIX}"
        return path if path is not None and path.is_file() else None
