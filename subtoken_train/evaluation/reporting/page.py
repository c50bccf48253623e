"""The report as one HTML page that needs nothing else: no script, no network, no other file; and its charts.

Charts show accuracy against KV, differences to the anchors, and a map of needles. An arm has one colour and marker in
all of them; arms of one curve share the colour. What compression could not change is grey. Everything that comes from
models or data sets is escaped by Jinja; drawings are SVG.
"""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from subtoken_train.errors import plain
from subtoken_train.evaluation.charts import COLORS, INK, MARKERS, axes_in_a_row, styled, svg_of
from subtoken_train.evaluation.reporting import report as words
from subtoken_train.evaluation.reporting.curves import Curve
from subtoken_train.evaluation.reporting.report import Report, spoken
from subtoken_train.evaluation.reporting.score_tables import MEANS, Estimate, KindScores, ScoreTable
from subtoken_train.evaluation.tasks.made_texts import cell_of
from subtoken_train.types import grouped
from subtoken_train.version import __version__

WIDTH, LINE = 7.2, 0.19
"""Inches: of every chart, and of a line of text."""
MOOT = "#909090"
MOOT_BAR: dict[str, Any] = {"facecolor": (MOOT, 0.4), "edgecolor": MOOT}
MOOT_WORDS = "grey: acts after the one-word answer"


class Series(NamedTuple):
    """Look of an arm in all charts; ``turn`` counts the earlier arms of its colour."""

    title: str
    color: str
    turn: int = 0

    @property
    def marker(self) -> str:
        """The shape of its points."""
        return MARKERS[self.turn % len(MARKERS)]


def series_of(report: Report) -> dict[str, Series]:
    """Map each arm of the report to its look in charts."""
    compressed = [(point.arm.name, curve) for curve in report.curves for point in curve.points if point.arm.compressed]
    groups = {arm: f"{curve.backbone} {curve.name}" for arm, curve in compressed}
    colors: dict[str, str] = {}
    used: Counter[str] = Counter()
    series = {}
    for arm in report.arms:
        color = colors.setdefault(groups.get(arm.name, arm.name), COLORS[len(colors) % len(COLORS)])
        series[arm.name] = Series(report.titles[arm.name], color, used[color])
        used[color] += 1
    return series


@styled
def curve_chart(curves: Sequence[Curve], series: Mapping[str, Series]) -> Figure:
    """Draw mean score over the (logarithmic) share of KV kept, a line per method, whiskers of one standard error."""
    figure, (axes,) = axes_in_a_row(1, (WIDTH, 3.6 + LINE * 1.2 * len(curves)))
    handles = []
    for curve in curves:
        lead = series[next(point.arm.name for point in curve.points if point.arm.compressed)]
        places = [(100 * point.kv, 100 * point.estimate.value) for point in curve.points]
        axes.plot(*zip(*places, strict=True), color=lead.color, zorder=2)
        for point, place in zip(curve.points, places, strict=True):
            its = series[point.arm.name]
            color = MOOT if point.estimate.moot else its.color
            axes.errorbar(*place, 100 * (point.estimate.error or 0), color=color, marker=its.marker, capsize=3)
        handles.append(Line2D([], [], color=lead.color, marker=lead.marker, label=_lines(spoken(curve.name), 70)))
    shares = [100 * point.kv for curve in curves for point in curve.points]
    low, high = np.floor(np.log2(min(shares) / 100)), np.ceil(np.log2(max(shares) / 100))
    ticks = 100 * 2.0 ** np.arange(low, high + 1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:.4g}%" for tick in ticks])
    axes.set_xlim(ticks[0] * 0.9, ticks[-1] * 1.1)
    axes.set(xlabel="KV of the compressed region that is kept, index included", ylabel="score, %")
    _legend(figure, handles, any(point.estimate.moot for curve in curves for point in curve.points))
    return figure


@styled
def difference_chart(table: ScoreTable, column: str, series: Mapping[str, Series]) -> Figure | None:
    """Draw each arm's difference to its anchor with its interval, zero marked; None where no arm has one."""
    pairs = [(row.arm.name, row.differences.get(column)) for row in table.rows]
    rows = [(arm, its) for arm, its in pairs if isinstance(its, Estimate) and its.form == "fraction"]
    if not rows:
        return None
    figure, (axes,) = axes_in_a_row(1, (WIDTH, 1.0 + 2.2 * LINE * len(rows)))
    for place, (arm, its) in enumerate(rows):
        color = MOOT if its.moot else series[arm].color
        if its.low is not None and its.high is not None:
            axes.hlines(place, 100 * its.low, 100 * its.high, color=color, linewidth=2.5, alpha=0.8)
        axes.plot(100 * its.value, place, color=color, marker=series[arm].marker, markersize=8, linestyle="")
    axes.axvline(0, color=INK, linewidth=1)
    axes.set_yticks(range(len(rows)), [_lines(series[arm].title, 34) for arm, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="points of % above (+) or below (-) the anchor")
    _legend(figure, [], any(its.moot for _, its in rows))
    return figure


@styled
def map_chart(scores: KindScores, cells: Mapping[str, tuple[str, str]], titles: Mapping[str, str]) -> Figure:
    """Draw a map of each arm: lengths across, depths down, each cell (kind -> length and depth) with its score."""
    lengths, depths = (list(dict.fromkeys(part)) for part in zip(*cells.values(), strict=True))
    columns, rows = min(2, len(scores.arms)), -(-len(scores.arms) // 2)
    figure = Figure(figsize=(WIDTH, rows * (0.9 + 0.32 * len(depths))), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, arm in zip(grid, scores.arms, strict=False):
        values = np.full((len(depths), len(lengths)), np.nan)
        for kind, (length, depth) in cells.items():
            if kind in scores.arms[arm]:
                values[depths.index(depth), lengths.index(length)] = 100 * scores.arms[arm][kind].value
        axes.imshow(values, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        for (down, across), value in np.ndenumerate(values):
            color = "white" if value > 60 else INK
            axes.text(across, down, "" if np.isnan(value) else f"{value:.0f}", ha="center", va="center", color=color)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(depths)), depths)
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.set_title(_lines(titles[arm], 40))
    for axes in grid[len(scores.arms) :]:
        axes.set_visible(False)
    figure.supxlabel("length")
    figure.supylabel("depth of the needle")
    return figure


def _lines(words: str, width: int) -> str:
    """Wrap words to some width; of very long ones the middle goes, because names differ at their ends."""
    shown, most = plain(words), 3 * width - 3
    return textwrap.fill(shown if len(shown) <= most else f"{shown[: most // 2]}…{shown[-most // 2 :]}", width)


def _legend(figure: Figure, handles: Sequence[Line2D | Patch], moot: bool) -> None:
    shown = [*handles, *([Patch(**MOOT_BAR, label=MOOT_WORDS)] if moot else [])]
    if shown:
        longest = max(len(str(handle.get_label())) for handle in shown)
        figure.legend(handles=shown, loc="outside lower left", ncols=2 if longest <= 42 else 1)


def report_html(report: Report) -> str:
    """Return the whole page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(words=words)
    source = files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    sections, series = words.sections(report), series_of(report)
    charts = [_charts(part, f"chart-{place}", series) for place, part in enumerate(sections)]
    given = {"report": report, "sections": sections, "charts": charts, "means": MEANS, "version": __version__}
    return environment.from_string(source).render(**given)


def _charts(part: words.Section, name: str, series: Mapping[str, Series]) -> list[dict[str, str]]:
    about = part.about
    found: dict[str, Figure | None] = {}
    if isinstance(about, ScoreTable):  # the means where there are means, else every task
        drawn = {column: difference_chart(about, column, series) for column in about.columns}
        shown = [column for column in drawn if column in MEANS and drawn[column]] or list(drawn)
        found = {f"{about.columns[column]}: difference to the anchor": drawn[column] for column in shown}
    elif isinstance(about, KindScores):
        cells = {kind: cell for kind in about.kinds if (cell := cell_of(kind)) is not None}
        if len(cells) == len(about.kinds):
            titles = {arm: its.title for arm, its in series.items()}
            found = {f"{about.task}: needles found, in %": map_chart(about, cells, titles)}
    elif isinstance(about, tuple):  # curves over other tasks are not drawn into one picture
        titled = ((f"{curve.backbone}: mean score of {', '.join(curve.tasks)} against KV", curve) for curve in about)
        found = {title: curve_chart(group, series) for title, group in grouped(titled).items()}
    description = "The numbers are in the tables of this section."
    return [
        {"caption": caption, "svg": svg_of(figure, f"{name}-{number}", caption, description)}
        for number, (caption, figure) in enumerate(found.items())
        if figure is not None
    ]
