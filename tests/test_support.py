"""Tools of ``tests/support``: what ``host_reads`` notes, and the cells that ``sampling`` makes of factors."""

import pytest
import torch

from tests.support.shards import host_reads

NUMBERS, COUNTS = torch.arange(6.0), torch.arange(3)
MARKS = NUMBERS > 2
WAITING = {
    **{name: lambda name=name: getattr(NUMBERS.sum(), name)() for name in ("tolist", "cpu", "numpy", "item")},
    "bool": lambda: bool(MARKS.any()), "int": lambda: int(COUNTS[0]), "slice": lambda: NUMBERS[: COUNTS[2]],
    "nonzero": MARKS.nonzero, "where": lambda: torch.where(MARKS),
    "masked_select": lambda: NUMBERS.masked_select(MARKS), "mask": lambda: NUMBERS[MARKS],
    "repeat": lambda: COUNTS.repeat_interleave(COUNTS), "unique": COUNTS.unique,
    "equal": lambda: torch.equal(COUNTS, COUNTS), "tensor": lambda: torch.tensor([1, 2]),
    "factor": lambda: torch.linalg.cholesky(torch.eye(2)), "axes": lambda: torch.linalg.eigh(torch.eye(2)),
}  # fmt: skip
NOT_WAITING = {
    "index": lambda: NUMBERS[COUNTS], "repeat": lambda: COUNTS.repeat_interleave(2),
    "sized": lambda: COUNTS.repeat_interleave(COUNTS, output_size=3),
    "static": lambda: torch.nonzero_static(MARKS, size=3), "sort": NUMBERS.sort,
    "fill": lambda: NUMBERS.masked_fill(MARKS, 0),
}  # fmt: skip


@pytest.mark.parametrize(("waits", "name"), [*((True, each) for each in WAITING), *((False, x) for x in NOT_WAITING)])
def test_what_waits_is_noted_once_and_nothing_else(waits, name):
    with host_reads() as found:
        (WAITING if waits else NOT_WAITING)[name]()
    assert len(found) == waits
