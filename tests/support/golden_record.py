"""The table of how far each golden case is from the original."""

import csv
import os
from pathlib import Path

import torch


def record(method: str, case: str, difference: float) -> None:
    """Append a row ``method,case,max_difference`` to the file that SUBTOKEN_GOLDEN_TABLE names, if it names one."""
    table = os.environ.get("SUBTOKEN_GOLDEN_TABLE")
    if table:
        with Path(table).open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([method, case, f"{difference:g}"])


def near(method, case, ours, golden, rtol=1e-4, atol=1e-6):
    """The numbers are the original's within the golden's tolerance; the largest difference is noted."""
    assert ours.shape == golden.shape
    record(method, case, float((ours - golden).abs().max()))
    assert torch.allclose(ours, golden, rtol=rtol, atol=atol)


def alike(method, case, ours, golden):
    """The same marks or places, one by one; how many differ is noted."""
    assert ours.shape == golden.shape
    differing = int((ours != golden).sum())
    record(method, f"{case}: places that differ", differing)
    assert differing == 0
