"""``docs/paper_items.yaml`` covers the papers, leads nowhere that is not there, and gives its reasons."""

from __future__ import annotations

import re

import pytest
from making.paper_items import PAPERS, PaperItem, exists, part_faults, read_items

ITEMS = read_items()


def test_every_paper_has_its_items():
    assert list(ITEMS) == list(PAPERS)


@pytest.mark.parametrize("paper", ITEMS)
def test_every_item_is_sound(paper):
    assert [fault for item in ITEMS[paper] for fault in item.faults()] == []
    names = [item.item for item in ITEMS[paper]]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("paper", ITEMS)
def test_an_item_is_what_its_worst_part_is(paper):
    assert part_faults(ITEMS[paper]) == []


def test_a_better_item_than_its_parts_is_a_fault():
    whole, rows = (
        PaperItem("Table 1: all", "exact"),
        [PaperItem("Table 1, a row", "reading"), PaperItem("Eq. 1", "exact")],
    )
    assert part_faults([whole, *rows]) == ["Table 1: all: how is 'exact', and its worst part is 'reading'"]
    named = PaperItem("Figure 1", "reading", parts=("Eq. 1", "Eq. 2"))
    assert part_faults([named, *rows]) == [
        "Figure 1: 'Eq. 2' is no one item",
        "Figure 1: how is 'reading', and its worst part is 'exact'",
    ]
    assert part_faults([PaperItem("Table 1: all", "reading"), *rows]) == []


@pytest.mark.parametrize("paper", ITEMS)
def test_every_numbered_table_and_figure_has_an_item(paper, shared):
    """Those that the paper's text names; "Table 3: ..." is Table 3's."""
    (text,) = (path.read_text(encoding="utf-8") for path in (shared / "papers").glob(f"{paper}*.txt"))
    numbered = {f"{kind} {number}" for kind, number in re.findall(r"\b(Table|Figure)s? (\d+)", text)}
    found = {match[0] for item in ITEMS[paper] if (match := re.match(r"(Table|Figure) \d+", item.item))}
    assert numbered <= found, sorted(numbered - found)


@pytest.mark.parametrize(
    ("place", "there"),
    [
        ("recipes/paper_rows.csv", True),
        ("table1_llava7b", True),
        ("llava7b_fastv25_s16k4", True),
        ("subtoken_train/ledger/kv_budget.py::KVBudget.exact_total", True),
        ("benchmarks/real_text.py::NAMES", True),
        ("subtoken_train/ledger/kv_budget.py::KVBudgt", False),
        ("recipes/paper_rows.csv::table", False),
        ("llava7b_fastv26_s16k4", False),
        ("subtoken_train/nowhere.py", False),
    ],
)
def test_places(place, there):
    assert exists(place) == there


@pytest.mark.parametrize(
    ("item", "fault"),
    [
        (PaperItem("Table 1", "done", ("docs",)), "Table 1: how is 'done'; it must be one of exact, reading, not done"),
        (PaperItem("Table 1", "not done"), "Table 1: 'not done' needs a note: the reading taken, or the reason"),
        (
            PaperItem("Table 1", "reading", ("docs",), " "),
            "Table 1: 'reading' needs a note: the reading taken, or the reason",
        ),
        (
            PaperItem("Table 1", "exact", ("docs",), "its form is a reading"),
            "Table 1: the note says 'reading', which 'exact' is not",
        ),
        (PaperItem("Table 1", "exact"), "Table 1: where is empty; name a path, path::symbol, or a recipe"),
        (PaperItem("Table 1", "exact", ("gone",)), "Table 1: 'gone' is no path, no path::symbol and no recipe"),
    ],
)
def test_faults_are_said(item, fault):
    assert item.faults() == [fault]


def test_a_broken_file_is_refused(tmp_path):
    path = tmp_path / "items.yaml"
    path.write_text("another_paper: []\n")
    with pytest.raises(ValueError, match=r"items.yaml must map papers \(subtoken_routing, .*got {'another_paper'}"):
        read_items(path)
    path.write_text("aircache:\n  - {item: Table 1, how: exact, were: [docs]}\n")
    with pytest.raises(ValueError, match=r"items.yaml: aircache\[0\]: unknown key 'were'. Did you mean 'where'"):
        read_items(path)
