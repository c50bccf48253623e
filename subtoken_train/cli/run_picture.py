"""The small picture of a training run: its loss, what its routers keep, its score beside its anchor's.

Drawn from the logs, so that it shows the whole course of a run that was resumed.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from subtoken_train.artifact.whole_folder import RECIPE_FILE
from subtoken_train.cli.anchor import SUFFIX
from subtoken_train.cli.loggers import logged
from subtoken_train.cli.terminal import one_line
from subtoken_train.documents import read_yaml

_SCORE = "eval/accuracy"
_LOSSES = {"train/loss": "training", "val/loss": "validation"}
_USAGE = re.compile(r"group_usage_entropy/layer_(\d+)")
_INCHES = (4.4, 3.0)
"""Of each chart; a hundred pixels to an inch."""
_COLOURS = 256
"""Of the file, so that a byte is a pixel and noise stays below 100 kB."""

Courses = Mapping[str, Mapping[int, float]]


def picture_of_run(folder: Path) -> bytes | None:
    """A PNG of a run's course; None where nothing was logged, or it cannot be drawn, which is said on stderr.

    An adapter that took days is not lost for its picture, whatever is wrong with that.
    """
    try:
        return draw_run(folder)
    except Exception as error:
        print(f"no picture of the training: {one_line(error)}", file=sys.stderr)
        return None


def draw_run(folder: Path) -> bytes | None:
    """A PNG of a run's course, None where no loss was logged.

    Raises:
        ValueError: logs that are none.
    """
    courses = logged(folder)
    losses = {words: courses[name] for name, words in _LOSSES.items() if name in courses}
    if not losses:
        return None
    from subtoken_train.evaluation.charts import axes_in_a_row, draw_cells, draw_courses, image_of

    usage, scores = _usage(courses), scores_beside_anchor(folder, courses)
    figure, axes = axes_in_a_row(1 + bool(usage) + bool(scores), _INCHES)
    left = iter(axes)
    draw_courses(next(left), losses, "loss", "step", "per answer token")
    if usage:
        steps = sorted(next(iter(usage.values())))
        rows = [[usage[layer].get(step, float("nan")) for step in steps] for layer in sorted(usage)]
        title, ends = "evenness of group usage", (steps[0], steps[-1] + 1)
        draw_cells(next(left), rows, title, "step", "layer", min(usage), ends)
    if scores:
        draw_courses(next(left), scores, "score midway", "step", _SCORE)
    file = io.BytesIO()
    image_of(figure).quantize(_COLOURS).save(file, "PNG", optimize=True)
    return file.getvalue()


def scores_beside_anchor(folder: Path, courses: Courses) -> dict[str, Mapping[int, float]]:
    """Scores by step of a run and, where it lies beside it and answered the same questions, of its anchor's.

    The anchor of ``runs/NAME`` is ``runs/NAME_anchor``; an anchor is drawn beside its routed run.

    Args:
        folder: the run's.
        courses: what it logged.

    Raises:
        ValueError: recipe or logs of the other one are none.
    """
    if _SCORE not in courses:
        return {}
    own: dict[str, Mapping[int, float]] = {"this run": courses[_SCORE]}
    is_anchor = folder.name.endswith(SUFFIX)
    other = folder.with_name(folder.name.removesuffix(SUFFIX) if is_anchor else f"{folder.name}{SUFFIX}")
    if not (other / RECIPE_FILE).is_file():
        return own
    asked = [read_yaml(place / RECIPE_FILE).get("evaluation") for place in (folder, other)]
    scores = logged(other).get(_SCORE) if asked[0] == asked[1] else None
    return own if scores is None else {**own, "routed run" if is_anchor else "anchor": scores}


def _usage(courses: Courses) -> dict[int, Mapping[int, float]]:
    """Layer -> step -> how evenly its value groups are kept; empty without routing."""
    found = {name: _USAGE.fullmatch(name) for name in courses}
    return {int(match[1]): courses[name] for name, match in found.items() if match}
