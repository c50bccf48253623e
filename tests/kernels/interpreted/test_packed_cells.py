"""Cells of the equality matrix whose steps the interpreted kernels compute: prompts, packing, decoding, the truth."""

import random
from functools import cache

import pytest

from subtoken_train.kernels import triton_attention
from subtoken_train.kernels.choice import VARIABLE
from subtoken_train.kernels.formats import FORMATS, MODEL
from tests.support.sampling import Cell, pairwise
from tests.support.truth_cells import FACTORS, allowed, compression_of, difference

CELLS, STEPS = 100, 2


def served(cell: Cell) -> bool:
    """Not: pages that each step chooses; bf16, whose products the interpreter gets wrong; formats without a kernel."""
    eviction, form = compression_of(cell).eviction, FORMATS.get(cell["precision"], MODEL)
    reads = eviction is not None and eviction.reads
    return cell["precision"] != "bf16" and form.bits in form.triton and not reads and allowed(cell)


@cache
def cells() -> list[Cell]:
    every = [cell for cell in pairwise(FACTORS, allowed) if served(cell)]
    return random.Random(0).sample(every, min(CELLS, len(every)))


def test_there_are_enough():
    assert len(cells()) == CELLS


@pytest.mark.parametrize("number", range(CELLS))
def test_fused_steps_are_the_truth(number, monkeypatch):
    monkeypatch.setenv(VARIABLE, "triton")
    calls = []
    fused = triton_attention.fused_decoding
    monkeypatch.setattr(triton_attention, "fused_decoding", lambda *args: calls.append(1) or fused(*args))
    cell = cells()[number]
    found = difference(cell, STEPS)
    assert found.fits(cell["precision"]), (cell, found)
    assert calls
