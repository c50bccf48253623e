"""Tables of what records hold beside scores (``MEASURES``): a row per arm, or difference, and group of questions.

Legend: s seeds, n questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from subtoken_train.artifact.card import printed
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.evaluation.runner.data_file import MEASURES, measure_names, verdict_words

Figures = npt.NDArray[np.float64]
NOTHING = "-"


class Measured(Protocol):
    """All seeds of an arm."""

    @property
    def seeds(self) -> Sequence[int]:
        """Of its runs."""

    @property
    def measures(self) -> Mapping[str, Figures]:
        """By name, [s, n]; NaN where a question has no figure."""

    def scores_of(self, group: str) -> Figures:
        """Scores of a group of questions, [s, n of it]."""

    def measure_of(self, name: str, group: str) -> Figures:
        """A measure of a group of questions, [s, n of it]."""


def common_measures(first: Measured, second: Measured) -> list[str]:
    """Return the measures that both arms have."""
    return [name for name in first.measures if name in second.measures]


def measure_markdown(
    arms: Sequence[tuple[str, Measured]], pairs: Sequence[tuple[str, Measured, Measured]], groups: Sequence[str]
) -> list[str]:
    """Two tables in Markdown, each after an empty line; nothing where no arm has measures.

    Args:
        arms: words of a row, and whose it is. Those without measures have no row.
        pairs: words, an arm, and what it is compared with, over the same seeds.
        groups: of questions, a row each.
    """
    names = measure_names([arm.measures for _, arm in arms])
    if not names:
        return []
    lines = _head(["arm", "group", *names])
    for words, arm in arms:
        for group in groups if arm.measures else ():
            found = {name: _known(arm.measure_of(name, group)) for name in names if name in arm.measures}
            lines.append(_row([words, group, *(_cell(name, found.get(name)) for name in names)]))
    measured = [(*pair, both) for pair in pairs if (both := common_measures(*pair[1:]))]
    if measured:
        lines += _head(["difference", "seeds", "group", "score", *names, "by all"])
    for words, first, second, both in measured:
        for group in groups:
            found = {"score": first.scores_of(group) - second.scores_of(group)}
            found |= {name: _known(first.measure_of(name, group) - second.measure_of(name, group)) for name in both}
            cells = [_cell(name, found.get(name), "+") for name in ("score", *names)]
            intervals = {
                MEASURES.get(name, name): bootstrap_interval(figures) for name, figures in found.items() if figures.size
            }
            verdict = verdict_words(intervals).partition(" (")[0]
            lines.append(_row([words, str(len(first.seeds)), group, *cells, verdict]))
    return lines


def _head(columns: Sequence[str]) -> list[str]:
    """Return an empty line and a table's head; measures have their words."""
    return ["", _row([MEASURES.get(name, name) for name in columns]), "|" + "---|" * len(columns)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _known(figures_sn: Figures) -> Figures:
    """The questions that have a figure in every seed."""
    return figures_sn[:, ~np.isnan(figures_sn).any(0)]


def _cell(name: str, figures: Figures | None, sign: Literal["", "+"] = "") -> str:
    if figures is None or not figures.size:
        return NOTHING
    low, high = (printed(name, end, sign) for end in bootstrap_interval(figures))
    return f"{printed(name, float(figures.mean()), sign)} [{low}, {high}]"
