"""The table of the original implementations' cases: complete, within tolerance, as the program writes it."""

import csv
from pathlib import Path

from benchmarks.goldens import COLUMNS, TABLE, golden_tests, noted
from tests.support.golden_cases import record

PAGE = Path(__file__).resolve().parents[1] / "docs" / "quality.md"


def table():
    with TABLE.open(newline="") as file:
        return list(csv.reader(file))


def explained():
    """Folders that the page names with a reason."""
    rows = PAGE.read_text().split("<!-- goldens:start -->\n")[1].split("<!-- goldens:end -->")[0].splitlines()[2:]
    return {name.strip() for row in rows for name in row.split("|")[1].split(",")}


def test_every_folder_is_compared_or_explained(shared):
    """A case begins with its folder's name, or holds it as a word."""
    folders = {path.name for path in (shared / "golden").iterdir()}
    words = {word.strip(":,") for _, case, _ in table()[1:] for word in case.split()}
    assert folders - words - explained() == set()
    assert explained() <= folders


def test_sets_are_the_originals_and_scores_are_near():
    header, *rows = table()
    assert header == COLUMNS
    assert len({(method, case) for method, case, _ in rows}) == len(rows)
    for method, case, difference in rows:
        exact = "that differ" in case or "counts" in case
        assert "misses" in case or float(difference) <= (0 if exact else 1e-4), (method, case)


def test_notes_become_rows(tmp_path, monkeypatch):
    notes = tmp_path / "notes.csv"
    monkeypatch.setenv("SUBTOKEN_GOLDEN_TABLE", str(notes))
    for case, difference in (("b, with a comma", 0.25), ("a", 1e-7), ("b, with a comma", 0.5)):
        record("some", case, difference)
    assert noted(notes) == [["some", "a", "1e-07"], ["some", "b, with a comma", "0.5"]]


def test_tests_that_note_are_found():
    names = {path.name for path in golden_tests()}
    assert {"test_snapkv.py", "test_kvcompose.py", "test_key_channels.py", "test_fastv.py", "test_merging.py"} <= names
