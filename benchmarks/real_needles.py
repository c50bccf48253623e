"""Needles at depths of texts, on a real model: from a grid's results to a record and a map of each arm.

subtoken-train evaluate --config recipes/real/needles.yaml         # stopped, it goes on
python -m benchmarks.real_needles --results results/needles        # its finished arms into the record; the picture
python -m benchmarks.real_needles                                  # the picture from the record
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.pages import svg_file
from benchmarks.real_ruler import FULL, compact, joined
from benchmarks.real_text import OUT
from subtoken_train.evaluation.reporting.page import map_chart
from subtoken_train.evaluation.reporting.score_tables import Estimate, KindScores
from subtoken_train.evaluation.tasks.made_texts import cell_of, kind_of

RECORD, PICTURE = OUT / "needles.json", OUT / "needles.svg"


def figure(record: Mapping[str, Any]) -> Figure:
    """Draw a map of each arm."""
    places = {kind_of(length, depth): f"{length}-{depth:g}" for length, depth in _cells(record)}
    kinds, arms = np.array(record["kinds"]), {}
    for name, arm in record["arms"].items():
        scores = np.array(arm["scores"])
        means = {kind: float(scores[kinds == place].mean()) for kind, place in places.items()}
        arms[name] = {kind: Estimate(mean, None, None, None, 0) for kind, mean in means.items()}
    cells = {kind: cell for kind in places if (cell := cell_of(kind)) is not None}
    return map_chart(KindScores("needle_map", tuple(places), arms), cells, {name: name for name in arms})


def _cells(record: Mapping[str, Any]) -> list[tuple[int, float]]:
    options = record["options"]
    return [(length, depth) for length in sorted(options["lengths"]) for depth in sorted(options["depths"])]


def picture(record: Mapping[str, Any]) -> str:
    """Return the maps as an SVG file."""
    words = "Needles that each arm finds at every depth and length"
    return svg_file(figure(record), "needles", "Needles found, by depth and length", words)


def main() -> None:
    """Write the record where results are given, and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="folder of the grid's results")
    if (results := parser.parse_args().results) is not None:
        found = compact(results, "needle_map")
        if RECORD.exists():
            found = joined(json.loads(RECORD.read_text(encoding="utf-8")), found)
        found["arms"] = dict(sorted(found["arms"].items(), key=lambda arm: arm[0] != FULL))
        RECORD.write_text(json.dumps(found) + "\n", encoding="utf-8")
    PICTURE.write_text(picture(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
