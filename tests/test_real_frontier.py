"""benchmarks/real_frontier.py: the arm that loses least at each size; the page and the picture are of the records."""

from __future__ import annotations

from benchmarks.real_frontier import (
    PAGE,
    SVG_FILE,
    blind,
    measured,
    measured_on_tasks,
    picture,
    shipped,
    table,
    winners,
)
from benchmarks.real_text import NAMES
from subtoken_train.cli.recommend import FILE
from tests.support.places import shown


def record(share, facts, text):
    """One beside a full cache of 0.5 nats a fact and 3 a token."""
    own = {"share": [share] * 3, "facts": [[facts] * 2] * 3, "exact": [[1, 0]] * 3, "text": [text * 127] * 3}
    return {**own, "full": {**own, "facts": [[0.5] * 2] * 3, "text": [3.0 * 127] * 3}}


def test_a_size_names_what_fits_it_and_loses_least():
    records = {
        "full cache": record(1.0, 0.5, 3.0),
        "int8 of everything": record(0.51, 0.5, 3.25),
        "kvzip 50.0%": record(0.5, 0.75, 3.0),
        "kvzip 21.9%": record(0.22, 9.0, 9.0),
    }
    first, second, *rest = table(measured({"smollm2": records}), ["smollm2"]).splitlines()[2:]
    assert first.startswith("| 53.0% | SmolLM2-135M | int8 of everything (51.0%) | +0.00 [")
    assert "| kvzip 50.0% (50.0%) | +0.000 [" in first
    assert second.startswith("| 27.0% | SmolLM2-135M | kvzip 21.9% (22.0%) | +8.50 [")
    assert rest == []  # no record is small enough for the other sizes


def test_only_what_wins_somewhere_is_shipped():
    models = {
        "qwen05": {
            "full cache": record(1.0, 0.5, 3.0),
            "int8 of everything": record(0.5, 0.75, 3.5),
            "kvzip 21.9%": record(0.2, 1.0, 4.0),
            "snapkv 50.0%": record(0.5, 2.0, 5.0),  # at the same bytes it loses more
            "kvzap 21.9%": record(0.2, 1.0, 4.0),
        },
        "smollm2": {
            "full cache": record(1.0, 0.5, 3.0),
            "snapkv 21.9%": record(0.2, 0.5, 3.0),  # loses nothing, on the model that has its record
            "kvzip 21.9%": record(0.2, 1.0, 4.0),
        },
    }
    kept = winners(measured(models), list(models))
    assert [each.arm for each in kept] == ["kvzip 21.9%", "snapkv 21.9%", "int8 of everything"]
    assert [list(each.on) for each in kept] == [["qwen05", "smollm2"], ["smollm2"], ["qwen05"]]


def test_the_page_the_picture_and_what_the_command_reads_are_of_the_records():
    models = {name: blind(name) for name in NAMES}
    assert all("full cache" in records for records in models.values())
    found, names = measured(models), list(NAMES)
    assert shown(PAGE, "frontier") == table(found, names)
    own = shipped(text=(NAMES, winners(found, names)), tasks=measured_on_tasks())
    assert FILE.read_text(encoding="utf-8") == own
    assert SVG_FILE.read_text(encoding="utf-8") == picture(models["qwen05"])
