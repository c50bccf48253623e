"""Mutants are small faults of the code that functions run, and their records are compared mutant by mutant."""

from __future__ import annotations

import ast

import pytest

from benchmarks.mutants import compare, mutants_of

TEXT = """'''Text with 1 number.'''
LIMIT = 5  # ü

def clamp(value: "Literal[3]", low: int = 2) -> int:
    note: Literal[4] = f"ü {value + 1}"
    if not value < low and value in (7,):
        raise ValueError("ü")
    value += low
    print(value)
    return low - value
"""


def test_every_kind_of_fault_and_nothing_else():
    found = [(each.line, each.kind, each.before, each.after) for each in mutants_of("a.py", TEXT)]
    assert sorted(found) == [
        (6, "comparison", "value < low", "(value <= low)"),
        (6, "comparison", "value in (7,)", "(value not in (7,))"),
        (6, "condition", "not value < low", "(value < low)"),
        (6, "condition", "not value < low and value in (7,)", "(not value < low or value in (7,))"),
        (6, "number", "7", "8"),
        (7, "dropped", 'raise ValueError("ü")', "pass"),
        (8, "dropped", "value += low", "pass"),
        (9, "dropped", "print(value)", "pass"),
        (10, "arithmetic", "low - value", "(low + value)"),
    ]


def test_a_mutant_is_the_file_with_one_fault():
    for mutant in mutants_of("a.py", TEXT):
        changed = mutant.applied(TEXT)
        ast.parse(changed)
        assert changed != TEXT
        assert len(changed.splitlines()) == len(TEXT.splitlines())
        assert [i for i, pair in enumerate(zip(TEXT.splitlines(), changed.splitlines(), strict=True), 1)
                if pair[0] != pair[1]] == [mutant.line]  # fmt: skip


def tried(**killed):
    return {"each": [{"name": name, "killed": was} for name, was in killed.items()]}


def test_kills_that_are_lost_are_named():
    before = tried(a=True, b=True, c=False, d=True)
    assert compare(before, tried(a=True, b=False, c=True, d=True), 0.95) == (["b"], False)
    assert compare(before, tried(a=True, b=False, c=True, d=True), 0.66) == (["b"], True)
    assert compare(before, before, 1.0) == ([], True)
    with pytest.raises(ValueError, match="tried other mutants"):
        compare(before, tried(a=True), 0.95)
