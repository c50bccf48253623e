"""The report as one HTML page that needs nothing else: no script, no network, no other file.

Everything that comes from models or data sets is escaped by Jinja; drawings are SVG, pictures data URIs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from subtoken_train.evaluation.charts import svg_of
from subtoken_train.evaluation.reporting import sections as words
from subtoken_train.evaluation.reporting.curves import Curve
from subtoken_train.evaluation.reporting.kind_scores import KindScores
from subtoken_train.evaluation.reporting.plots import Series, curve_chart, difference_chart, kind_chart, series_of
from subtoken_train.evaluation.reporting.regressions import data_uri
from subtoken_train.evaluation.reporting.report import Report
from subtoken_train.evaluation.reporting.score_tables import MEANS, ScoreTable
from subtoken_train.version import __version__

TEMPLATE = "page.html.j2"


class Chart(NamedTuple):
    """A drawing with the words above it."""

    caption: str
    svg: Markup


def report_html(report: Report) -> str:
    """The whole page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(words=words, data_uri=data_uri, shortened=_without_middle)
    environment.filters["json_text"] = lambda value: json.dumps(value, ensure_ascii=False)
    source = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    sections, series = words.sections(report), series_of(report)
    charts = [_charts(part, f"chart-{place}", series) for place, part in enumerate(sections)]
    return environment.from_string(source).render(
        report=report, sections=sections, charts=charts, means=MEANS, version=__version__
    )


def _charts(part: words.Section, name: str, series: Mapping[str, Series]) -> list[Chart]:
    """What is drawn of a section's numbers; the words for a screen reader are those of the table beside it."""
    found: Iterable[tuple[str, Figure | None]] = ()
    if isinstance(part.about, ScoreTable):
        found = _differences(part.about, series)
    elif isinstance(part.about, KindScores):
        found = [(f"{part.about.task}: score per question kind", kind_chart(part.about, series))]
    elif isinstance(part.about, tuple):
        found = _curves(part.about, series)
    description = "The numbers are in the tables of this section."
    return [
        Chart(caption, svg_of(figure, f"{name}-{number}", caption, description))
        for number, (caption, figure) in enumerate(found)
        if figure is not None
    ]


def _differences(table: ScoreTable, series: Mapping[str, Series]) -> list[tuple[str, Figure | None]]:
    """The means' charts where there are means, else every task's."""
    charts = {column: difference_chart(table, column, series) for column in table.columns}
    shown = [column for column in charts if column in MEANS and charts[column]] or list(charts)
    return [(f"{table.columns[column]}: difference to the anchor", charts[column]) for column in shown]


def _curves(curves: tuple[Curve, ...], series: Mapping[str, Series]) -> list[tuple[str, Figure]]:
    """A chart per backbone and set of tasks: curves over other tasks are not drawn into one picture."""
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        title = f"{curve.backbone}: mean score of {', '.join(curve.tasks)} against KV"
        groups.setdefault(title, []).append(curve)
    return [(title, curve_chart(group, series)) for title, group in groups.items()]


def _without_middle(text: str, most: int = 700) -> str:
    """Long text without its middle."""
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"
