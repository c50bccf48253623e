"""The report as one HTML page that needs nothing else: no script, no network, no other file.

Everything that comes from models or data sets is escaped by Jinja; drawings are SVG, pictures data URIs.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from subtoken_train import __version__
from subtoken_train.evaluation.reporting import sections as words
from subtoken_train.evaluation.reporting.pictures import data_uri
from subtoken_train.evaluation.reporting.plots import curve_chart, difference_chart, kind_chart
from subtoken_train.evaluation.reporting.report import Report
from subtoken_train.evaluation.reporting.score_tables import Table
from subtoken_train.evaluation.reporting.svg import Drawing

TEMPLATE = "page.html.j2"


def report_html(report: Report) -> str:
    """The whole page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(words=words, data_uri=data_uri)
    environment.filters.update(fact_cells=words.fact_cells, task_cells=words.task_cells)
    environment.filters["json_text"] = lambda value: json.dumps(value, ensure_ascii=False)
    source = files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(
        report=report,
        differences=[_difference_charts(table, f"difference-{number}") for number, table in enumerate(report.tables)],
        curves=_curve_charts(report),
        kinds=[Chart.of(kind_chart(kinds), f"kinds-{number}") for number, kinds in enumerate(report.kinds)],
        version=__version__,
    )


class Chart(NamedTuple):
    """A drawing with the words above it."""

    caption: str
    svg: Markup

    @classmethod
    def of(cls, drawing: Drawing, name: str) -> Chart:
        """The drawing under its own title; ``name`` is unique in the page."""
        return cls(drawing.title, drawing.markup(name))


def _difference_charts(table: Table, name: str) -> list[Chart]:
    """The means' charts where there are means, else every task's."""
    charts = {column: difference_chart(table, column) for column in table.columns}
    shown = [column for column in charts if column.endswith("-mean") and charts[column]] or list(charts)
    return [Chart.of(chart, f"{name}-{column}") for column in shown if (chart := charts[column]) is not None]


def _curve_charts(report: Report) -> list[Chart]:
    """A chart per backbone and set of tasks: curves over other tasks are not drawn into one picture."""
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for place, curve in enumerate(report.curves):
        groups.setdefault((curve.backbone, curve.tasks), []).append(place)
    charts = []
    for number, ((backbone, tasks), places) in enumerate(groups.items()):
        title = f"{backbone}: mean score of {', '.join(tasks)} against KV"
        drawing = curve_chart([report.curves[place] for place in places], title)
        charts.append(Chart.of(drawing, f"curve-{number}"))
    return charts
