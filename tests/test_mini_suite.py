"""README's mini-suite: its table is that of the committed figures, its arms those that the suite runs."""

from __future__ import annotations

import csv
from xml.etree import ElementTree

from benchmarks.mini_suite import ARMS, CSV_FILE, END, ROOT, SCENES, START, SVG_FILE, table
from subtoken_train.evaluation.runner.arms import arm_name
from subtoken_train.evaluation.runner.spec import suite


def rows() -> list[dict[str, str]]:
    with CSV_FILE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_readme_shows_the_committed_figures():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.split(START + "\n")[1].split("\n" + END)[0] == table(rows())


def test_the_arms_are_those_of_the_suite(tmp_path, monkeypatch):
    monkeypatch.setattr("subtoken_train.evaluation.runner.spec.SCENES", 1)
    grids = suite("mini", tmp_path)
    names = {arm_name(spec).replace("-seed0", "", 1) for grid in grids for spec in grid.arms}
    assert names == set(ARMS)
    assert {row["arm"] for row in rows()} == names
    assert {task.name for grid in grids for task in grid.tasks} == {*SCENES, "recall"}


def test_the_plot_names_its_arms_and_references_nothing():
    text = SVG_FILE.read_text(encoding="utf-8")
    words = " ".join(ElementTree.fromstring(text).itertext())
    assert all(label in words for arm, label in ARMS.items() if arm.startswith("tiny_") and "snapkv" not in arm)
    assert "href" not in text
