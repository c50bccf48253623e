"""The project's size: who adds removes, for a ceiling is only ever lowered."""

import subprocess
from pathlib import Path

import pytest

from tests.support.places import ROOT

CEILINGS = {
    "lines of the package": 51_364,
    "files of the package": 278,
    "lines of tests": 51_966,
    "lines of benchmark programs": 5_395,
    "words of pages": 38_357,
    "tracked megabytes": 23.87,
}
"""What there may be at most."""
BESIDE = (".", "recipes", "data", "checkpoints", "benchmarks")
"""Folders whose README counts as a page."""


def lines(files: list[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in files)


def tracked() -> list[Path]:
    try:
        said = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is no checkout")
    return [
        path for name in said.decode().split("\0") if name and ((path := ROOT / name).is_file() or path.is_symlink())
    ]


def test_nothing_tracked_is_a_link():
    assert tracked()  # else this is no checkout
    said = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line for line in said.splitlines() if line.startswith("12")] == []


def counts() -> dict[str, float]:
    files = tracked()

    def room(name: str, *suffixes: str) -> list[Path]:
        return [path for path in files if path.is_relative_to(ROOT / name) and path.suffix in suffixes]

    package = room("subtoken_train", ".py", ".c")
    pages = [*room("docs", ".md"), *(ROOT / name / "README.md" for name in BESIDE)]
    return {
        "lines of the package": lines(package),
        "files of the package": len(package),
        "lines of tests": lines(room("tests", ".py")),
        "lines of benchmark programs": lines(room("benchmarks", ".py")),
        "words of pages": sum(len(path.read_text(encoding="utf-8").split()) for path in pages),
        "tracked megabytes": sum(path.stat().st_size for path in files) / 1e6,
    }


def test_nothing_grows():
    found = counts()
    assert found.keys() == CEILINGS.keys()
    grown = {what: f"{count:,.10g} of {CEILINGS[what]:,}" for what, count in found.items() if count > CEILINGS[what]}
    assert grown == {}, "remove as much as you add"
