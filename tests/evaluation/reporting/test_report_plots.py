"""Where things stand in the drawings, and that names are escaped in them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.reporting.curves import make_curves
from subtoken_train.evaluation.reporting.kinds import MAX_ARMS, make_kinds
from subtoken_train.evaluation.reporting.plots import BOTTOM, curve_chart, difference_chart, kind_chart
from subtoken_train.evaluation.reporting.runs import read_results
from subtoken_train.evaluation.reporting.score_tables import make_tables
from subtoken_train.evaluation.reporting.svg import Drawing, ticks_between
from tests.support.report_results import KINDS, answers, facts, register, write_run


@pytest.fixture
def arms(tmp_path, monkeypatch):
    register(monkeypatch, "pope")
    write_run(tmp_path, facts("lora"), "pope", answers(range(40)))
    write_run(tmp_path, facts("anchor", 0.25, reducer="fastv 0.25"), "pope", answers(range(20)))
    for name, right in (("better", 30), ("worse", 5), ("same", 20)):
        write_run(tmp_path, facts(name, 0.25, reducer="x 0.5", anchor="anchor"), "pope", answers(range(right)))
    return read_results([tmp_path])


def parsed(drawing: Drawing) -> ElementTree.Element:
    return ElementTree.fromstring(drawing.markup("name"))


@given(st.floats(-100, 100), st.floats(0, 200))
def test_ticks_hold_the_range_in_round_steps(low, width):
    ticks = ticks_between(low, low + width)
    assert ticks[0] <= low + 1e-6
    assert ticks[-1] >= low + width - 1e-6
    assert 2 <= len(ticks) <= 9
    assert ticks_between(40, 92.5) == [40, 50, 60, 70, 80, 90, 100]


def test_points_of_a_curve(arms):
    (curve,) = [curve for curve in make_curves(arms) if curve.name == "fastv"]
    drawing = parsed(curve_chart([curve], "title <&>"))
    assert drawing.find("title").text == "title <&>"
    assert drawing.find("desc").text == "fastv: 100.00 at 100.00%, 50.00 at 25.00%"
    full, reduced, legend = drawing.findall("circle")
    assert float(full.get("cy")) < float(reduced.get("cy")) <= BOTTOM
    assert float(full.get("cx")) > float(reduced.get("cx"))
    assert full.find("title").text == "lora: 100.00 ± 0.00 at 100.00% of the KV, n = 40"
    line = drawing.find("polyline[@class='curve c0']").get("points").split()
    assert line == [f"{dot.get('cx')},{dot.get('cy')}" for dot in (full, reduced)]
    assert legend.find("title").text == "fastv"
    labels = [text.text for text in drawing.findall("text")]
    assert {"25%", "50%", "100%", "score, %"} <= set(labels)


def test_differences_are_coloured_by_their_intervals(arms):
    (table,) = make_tables(arms)
    drawing = parsed(difference_chart(table, "pope"))
    bars = {bar.find("title").text.split(":")[0]: bar for bar in drawing.findall("rect")}
    assert {name: bar.get("class") for name, bar in bars.items()} == {"better": "c2", "same": "c7", "worse": "c1"}
    places = {name: float(bar.get("x")) + 4 for name, bar in bars.items()}
    (zero,) = {line.get("points").split(",")[0] for line in drawing.findall("polyline[@class='axis']")}
    assert places["worse"] < places["same"] == pytest.approx(float(zero), abs=0.2)
    assert places["same"] < places["better"]
    assert difference_chart(table, "3-mean") is None


def test_bars_per_kind_with_the_compared_arms_first(arms, tmp_path):
    for i in range(MAX_ARMS):
        write_run(tmp_path, facts(f"a{i}", 0.5, reducer="y 0.5"), "pope", answers(range(i)))
    (scores,) = make_kinds(read_results([tmp_path]))
    assert len(scores.arms) == MAX_ARMS + 5
    assert len(scores.drawn) == MAX_ARMS
    assert {"anchor", "better", "worse", "same"} <= set(scores.drawn)
    drawing = parsed(kind_chart(scores))
    bars = [bar for bar in drawing.findall("rect") if "," in bar.find("title").text]
    assert len(bars) == MAX_ARMS * len(KINDS)
    widths = {bar.find("title").text.split(":")[0]: float(bar.get("width")) for bar in bars}
    assert widths["better, colour"] == pytest.approx(3 * widths["worse, colour"] * 5 / 3, rel=0.01)  # 15 and 3 of 20


def test_names_are_text():
    drawing = Drawing(10, 10, "</title><script>", "\"'&")
    drawing.text((1, 2), "<b>", turned=True)
    drawing.bar(1, 2, 3, 4, "c0", "<i>")
    drawing.marker((1, 2), 1, "<u>")
    text = drawing.markup("name")
    assert not re.search(r"<(script|b|i|u)>", text)
    assert [element.tag for element in ElementTree.fromstring(text)] == ["title", "desc", "text", "rect", "polygon"]
