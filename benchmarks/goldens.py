"""How far evictions and token reducers are from the originals' outputs: runs the golden tests, writes their table.

    python benchmarks/goldens.py     # needs the reference data, where the tests look for it

Every test file that compares with recorded outputs notes (method, case, largest difference) as it goes; a case is named
after its folder of the reference data. The table is written only if all of these tests pass and none is skipped for
want of the data. ``docs/quality.md`` names the folders that are not compared, and why.
"""

import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks/results/goldens.csv"
COLUMNS = ["method", "case", "max_difference"]


def golden_tests() -> list[Path]:
    """Test files of the package's rooms that note a difference."""
    words = ("golden_record import", "golden_cases import")
    found = sorted(ROOT.glob("tests/*/**/test_*.py"))
    return [path for path in found if any(word in path.read_text() for word in words)]


def noted(path: Path) -> list[list[str]]:
    """The rows of a file of notes: sorted, a case's largest difference once."""
    largest: dict[tuple[str, str], float] = {}
    with path.open(newline="") as file:
        for method, case, difference in csv.reader(file):
            largest[method, case] = max(largest.get((method, case), 0.0), float(difference))
    return [[*key, f"{difference:g}"] for key, difference in sorted(largest.items())]


def main() -> int:
    """Run the tests and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes.csv"
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *map(str, golden_tests())]
        where = {**os.environ, "SUBTOKEN_GOLDEN_TABLE": str(notes)}
        done = subprocess.run(command, cwd=ROOT, env=where, capture_output=True, text=True, check=False)
        if done.returncode or "reference material" in done.stdout or not notes.exists():
            print(done.stdout[-4000:] + done.stderr[-2000:])
            print("nothing is written: a golden test fails, or the reference data is not there")
            return 1
        rows = noted(notes)
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    print(f"{len(rows)} cases written to {TABLE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
