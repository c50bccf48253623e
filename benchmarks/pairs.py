"""Interleaved timing of two or more things (the package's own, ``benchmarking/pairs.py``), and a program's record."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from subtoken_train.benchmarking.rounds import cell, hardware, interleaved, middle, ratio

__all__ = ["cell", "hardware", "interleaved", "middle", "ratio", "write"]


def write(record: Mapping[str, Any] | Sequence[Any], path: Path) -> None:
    """Write a record, or a list of them, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
