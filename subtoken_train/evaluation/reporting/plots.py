"""The report's charts: accuracy against KV, differences to the anchors, bars per question kind."""

from __future__ import annotations

import math
from collections.abc import Sequence

from subtoken_train.evaluation.reporting.curves import Curve, Point
from subtoken_train.evaluation.reporting.estimates import Figure
from subtoken_train.evaluation.reporting.kinds import KindScores
from subtoken_train.evaluation.reporting.score_tables import Table
from subtoken_train.evaluation.reporting.sections import difference_text, interval_text, value_text
from subtoken_train.evaluation.reporting.svg import Drawing, series_style, ticks_between

WIDTH = 600.0
LEFT, TOP, RIGHT, BOTTOM = 58.0, 16.0, 584.0, 320.0
"""The plot's box, for charts with two scales."""
LABELS, LETTER, LEGEND = 216.0, 6.9, 22.0
"""Room for the names of rows, the width of a letter (longer names are cut), the height of a line of the legend."""


def curve_chart(curves: Sequence[Curve], title: str) -> Drawing:
    """Mean score over the share of KV that is kept (logarithmic), a line per method, whiskers of one standard error."""
    columns = _legend_columns([curve.name for curve in curves])
    height = BOTTOM + 50 + LEGEND * math.ceil(len(curves) / columns)
    drawing = Drawing(WIDTH, height, title, "; ".join(map(_curve_words, curves)))
    points = [point for curve in curves for point in curve.points]
    ends = [100 * (point.figure.value + sign * (point.figure.error or 0)) for point in points for sign in (-1, 1)]
    y_ticks = ticks_between(min(ends), max(ends))
    shares = [point.kv for point in points]
    lowest = math.floor(math.log2(min(shares)) - 0.05) - 0.1
    highest = math.ceil(math.log2(max(shares)) - 0.05) + 0.1

    def place(point: Point, error: float = 0.0) -> tuple[float, float]:
        across = (math.log2(point.kv) - lowest) / (highest - lowest)
        return LEFT + across * (RIGHT - LEFT), _up(100 * (point.figure.value + error), y_ticks)

    for value in y_ticks:
        drawing.line([(LEFT, _up(value, y_ticks)), (RIGHT, _up(value, y_ticks))], "grid")
        drawing.text((LEFT - 8, _up(value, y_ticks) + 4), f"{value:g}", anchor="end")
    for power in range(math.ceil(lowest), math.floor(highest) + 1):
        x = LEFT + (power - lowest) / (highest - lowest) * (RIGHT - LEFT)
        drawing.line([(x, TOP), (x, BOTTOM)], "grid")
        drawing.text((x, BOTTOM + 18), f"{100 * 2.0**power:.4g}%")
    drawing.line([(LEFT, TOP), (LEFT, BOTTOM), (RIGHT, BOTTOM)], "axis")
    drawing.text(((LEFT + RIGHT) / 2, BOTTOM + 38), "KV of the compressed region that is kept, index included", "label")
    drawing.text((16, (TOP + BOTTOM) / 2), "score, %", "label", turned=True)
    for number, curve in enumerate(curves):
        style = series_style(number)
        drawing.line([place(point) for point in curve.points], f"curve {style}")
        for point in curve.points:
            error = point.figure.error or 0
            drawing.line([place(point, -error), place(point, error)], f"whisker {style}")
            drawing.marker(place(point), number, _point_words(point))
        x, y = LEFT + number % columns * 270, BOTTOM + 62 + LEGEND * (number // columns)
        drawing.marker((x, y - 4), number, curve.name)
        drawing.text((x + 12, y), _cut(curve.name, 520 / columns), anchor="start")
    return drawing


def difference_chart(table: Table, column: str) -> Drawing | None:
    """Each arm's difference to its anchor with its interval, zero in the middle; None where no arm has one."""
    rows = [(row, figure) for row in table.rows if isinstance(figure := row.differences.get(column), Figure)]
    rows = [(row, figure) for row, figure in rows if figure.form == "fraction"]
    if not rows:
        return None
    texts = [difference_text(figure, figure.n) for _, figure in rows]
    words = "; ".join(f"{row.arm.name} {text}" for (row, _), text in zip(rows, texts, strict=True))
    drawing = Drawing(WIDTH, 30 * len(rows) + 62, f"{table.columns[column]}: difference to the anchor", words)
    ends = [100 * end for _, figure in rows for end in (figure.low, figure.high, figure.value, 0.0) if end is not None]
    ticks = ticks_between(min(ends), max(ends))
    bottom = 30.0 * len(rows) + 18

    def across(value: float) -> float:
        return LABELS + (value - ticks[0]) / (ticks[-1] - ticks[0]) * (RIGHT - 14 - LABELS)

    for value in ticks:
        drawing.line([(across(value), 10), (across(value), bottom)], "axis" if value == 0 else "grid")
        drawing.text((across(value), bottom + 16), f"{value:+g}" if value else "0")
    drawing.text(((LABELS + RIGHT) / 2, bottom + 36), "points of % above (+) or below (-) the anchor", "label")
    for number, ((row, figure), text) in enumerate(zip(rows, texts, strict=True)):
        y = 30.0 * number + 28
        style = "c2" if figure.low is not None and figure.low > 0 else "c1" if (figure.high or 0) < 0 else "c7"
        drawing.text((LABELS - 12, y + 4), _cut(row.arm.name, LABELS - 24), anchor="end")
        if figure.low is not None and figure.high is not None:
            drawing.line([(across(100 * figure.low), y), (across(100 * figure.high), y)], f"range {style}")
        place = 100 * figure.value
        drawing.bar(
            across(place) - 4, y - 7, across(place) + 4, y + 7, style, f"{row.arm.name}: {text}, n = {figure.n:,}"
        )
    return drawing


def kind_chart(scores: KindScores) -> Drawing:
    """Bars per question kind, an arm beside the other, with 95 % intervals; of many arms the first."""
    arms = scores.drawn
    step, room = 11.0, 12.0
    block = step * len(arms) + room
    bottom = 14 + block * len(scores.kinds)
    columns = _legend_columns(arms)
    legend = LEGEND * math.ceil(len(arms) / columns)
    words = "; ".join(
        f"{kind}: "
        + ", ".join(f"{arm} {value_text(scores.arms[arm][kind])}" for arm in arms if kind in scores.arms[arm])
        for kind in scores.kinds
    )
    drawing = Drawing(WIDTH, bottom + 36 + legend, f"{scores.task}: score per question kind", words)
    for value in range(0, 101, 20):
        x = LABELS + value / 100 * (RIGHT - LABELS)
        drawing.line([(x, 10), (x, bottom)], "grid")
        drawing.text((x, bottom + 16), f"{value}")
    for row, kind in enumerate(scores.kinds):
        top = 14 + block * row
        drawing.text((LABELS - 12, top + step * len(arms) / 2 + 4), _cut(kind, LABELS - 24), anchor="end")
        for number, arm in enumerate(arms):
            figure = scores.arms[arm].get(kind)
            if figure is not None:
                _kind_bar(drawing, top + step * number, series_style(number), f"{arm}, {kind}", figure)
    drawing.line([(LABELS, 10), (LABELS, bottom)], "axis")
    for number, arm in enumerate(arms):
        x, y = 20 + number % columns * 290.0, bottom + 48 + LEGEND * (number // columns)
        drawing.bar(x, y - 10, x + 12, y + 1, series_style(number), arm)
        drawing.text((x + 20, y), _cut(arm, 520 / columns), anchor="start")
    return drawing


def _kind_bar(drawing: Drawing, top: float, style: str, name: str, figure: Figure) -> None:
    scale = (RIGHT - LABELS) / 1.0
    words = f"{name}: {value_text(figure)} {interval_text(figure)}, n = {figure.n:,}"
    drawing.bar(LABELS, top + 1, LABELS + scale * figure.value, top + 10, style, words)
    if figure.low is not None and figure.high is not None:
        y = top + 5.5
        drawing.line([(LABELS + scale * figure.low, y), (LABELS + scale * figure.high, y)], "thin")


def _up(value: float, ticks: Sequence[float]) -> float:
    return BOTTOM - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (BOTTOM - TOP)


def _cut(words: str, room: float) -> str:
    """Words that fit into some width; of longer ones the middle goes, because names differ at their ends."""
    most = int(room / LETTER)
    return words if len(words) <= most else f"{words[: most // 2]}…{words[-(most - most // 2 - 1) :]}"


def _legend_columns(names: Sequence[str]) -> int:
    return 1 if max(map(len, names)) * LETTER > 260 else 2


def _point_words(point: Point) -> str:
    figure = point.figure
    error = "" if figure.error is None else f" ± {100 * figure.error:.2f}"
    return f"{point.arm.name}: {value_text(figure)}{error} at {point.kv:.2%} of the KV, n = {figure.n:,}"


def _curve_words(curve: Curve) -> str:
    return f"{curve.name}: " + ", ".join(f"{value_text(point.figure)} at {point.kv:.2%}" for point in curve.points)
