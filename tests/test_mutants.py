"""Mutants are small faults of the code that functions run, and their records are compared mutant by mutant."""

from __future__ import annotations

import ast

import pytest

from benchmarks.mutants import Tree, counted, mutants_of

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


def test_kills_are_counted_by_who_kills():
    found = [{"name": name, "killed_by": by} for name, by in [("b", "quick"), ("a", None), ("c", "slow")]]
    counts = counted(found)
    assert (counts["mutants"], counts["killed"], counts["killed_by_quick"]) == (3, 2, 1)
    assert [each["name"] for each in counts["each"]] == ["a", "b", "c"]


@pytest.mark.slow
def test_a_mutant_is_tried_and_taken_out_again(tmp_path):
    """Killed by a quick test, by a slow one only, by none; a test that fails anyway kills nothing."""
    code = "def clamp(value):\n    return value < 3\n"
    tree = Tree(tmp_path / "tree")
    tree.path.mkdir()
    (tree.path / "clamping.py").write_text(code)
    (tree.path / "test_clamping.py").write_text(
        "from clamping import clamp\n"
        "def test_far(): assert clamp(1)\n"
        "def test_edge(): assert not clamp(3)\n"
        "def test_wrong(): assert not clamp(1)\n"
    )
    mutant = next(each for each in mutants_of("clamping.py", code) if each.kind == "comparison")
    far, edge, wrong, gone = ([f"test_clamping.py::test_{name}"] for name in ("far", "edge", "wrong", "gone"))
    given = [(far, edge), (wrong, far), (wrong + edge, []), (far + gone + edge, [])]
    assert [tree.verdict(mutant, *tests)["killed_by"] for tests in given] == ["slow", None, "quick", "quick"]
    assert (tree.path / "clamping.py").read_text() == code
    assert tree.unsound == {*wrong, *gone}
