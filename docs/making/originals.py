"""How far a method is from the original implementations' recorded outputs, from the committed table."""

import csv
from functools import cache
from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "goldens.csv"
_COUNTED = ("that differ", "counts", "misses")


@cache
def _rows() -> dict[str, list[tuple[str, float]]]:
    """Method -> (case, largest difference); a wrapper's cases stand under its own name."""
    found: dict[str, list[tuple[str, float]]] = {}
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            name = row["method"].partition("(")[0]
            found.setdefault(name, []).append((row["case"], float(row["max_difference"])))
    return found


def beside_original(name: str) -> str:
    """One sentence: the cases that were compared, what was chosen otherwise, the largest difference of numbers."""
    rows = _rows().get(name, [])
    if not rows:
        return "There are no recorded outputs of an original to compare with."
    chosen = [value for case, value in rows if "differ" in case or "counts" in case]
    missed = [value for case, value in rows if "misses" in case]
    numbers = [value for case, value in rows if not any(word in case for word in _COUNTED)]
    compared = f"{len(rows)} recorded case{'s' if len(rows) > 1 else ''}"
    said = [f"Beside the original ({compared}):"]
    parts = []
    if chosen:
        parts.append(f"entries or counts that differ {sum(chosen):g}")
    if numbers:
        parts.append(f"largest difference of scores and tensors {max(numbers):.2g}")
    if missed:
        parts.append(f"the release misses its own budget by up to {max(missed):g}")
    return " ".join([*said, "; ".join(parts)]) + "."
