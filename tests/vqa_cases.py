"""Reference cases of the VQA family, and how close scores are to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def reference_cases(shared: Path, name: str) -> list[dict[str, Any]]:
    """All lines of ``golden_eval/NAME`` of the reference material."""
    paths = sorted((shared / "golden_eval" / name).glob("set_*.jsonl"))
    if not paths:
        pytest.skip(f"reference material (golden_eval/{name}) is absent")
    return [case for path in paths for case in _lines(path)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from map(json.loads, file)


def mean_of(cases: list[float]) -> Any:
    """Their mean, for comparison to 1e-6."""
    return pytest.approx(sum(cases) / len(cases), abs=1e-6)
