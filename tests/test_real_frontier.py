"""benchmarks/real_frontier.py: the arm that loses least at each size; the page and the picture are of the records."""

from __future__ import annotations

from benchmarks.real_frontier import PAGE, SVG_FILE, blind, picture, table
from benchmarks.real_text import NAMES
from tests.support.places import shown


def record(share, facts, text):
    return {"share": [share] * 3, "facts": [[facts] * 2] * 3, "text": [text * 127] * 3}


def test_a_size_names_what_fits_it_and_loses_least():
    records = {
        "full cache": record(1.0, 0.5, 3.0),
        "int8 of everything": record(0.51, 0.5, 3.25),
        "kvzip 50.0%": record(0.5, 0.75, 3.0),
        "kvzip 21.9%": record(0.22, 9.0, 9.0),
    }
    first, second, *rest = table({"smollm2": records}).splitlines()[2:]
    assert first.startswith("| 53.0% | SmolLM2-135M | int8 of everything (51.0%) | +0.00 [")
    assert "| kvzip 50.0% (50.0%) | +0.000 [" in first
    assert second.startswith("| 27.0% | SmolLM2-135M | kvzip 21.9% (22.0%) | +8.50 [")
    assert len(rest) == 1  # 22.5 %: no record is small enough for the others


def test_the_page_and_the_picture_are_of_the_records():
    models = {name: blind(name) for name in NAMES}
    assert all("full cache" in records for records in models.values())
    assert shown(PAGE, "frontier") == table(models)
    assert SVG_FILE.read_text(encoding="utf-8") == picture(models)
