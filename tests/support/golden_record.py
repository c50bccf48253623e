"""The table of how far each golden case is from the original."""

import csv
import os
from pathlib import Path


def record(method: str, case: str, difference: float) -> None:
    """Append a row ``method,case,max_difference`` to the file that SUBTOKEN_GOLDEN_TABLE names, if it names one."""
    table = os.environ.get("SUBTOKEN_GOLDEN_TABLE")
    if table:
        with Path(table).open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([method, case, f"{difference:g}"])
