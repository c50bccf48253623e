"""The HTML page: balanced, self-contained, escaped; and where things stand in its drawings, in which colours."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from subtoken_train.evaluation.charts import COLORS, svg_of
from subtoken_train.evaluation.reporting import page as pages
from subtoken_train.evaluation.reporting.report import make_report
from subtoken_train.evaluation.reporting.score_tables import PAPER_TASKS
from tests.support.report_results import answers, clipped_texts, facts, paper_grid, write_run

HOSTILE = "<script>alert(1) & <img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """Elements with their attributes; fails at the first tag that does not close what was opened last."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "img", "br"}:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data):
        self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """The paper's seven tasks and one more, with a hostile name; a text, drawn once."""
    results = tmp_path_factory.mktemp("report") / "results"
    paper_grid(results, PAPER_TASKS, routed=range(20))
    hostile = facts("hostile", 0.1, reducer="fastv 0.1", anchor="fastv25_s16k4_anchor")
    manifest = write_run(results, hostile, "pope", answers(range(3))) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"hostile"', f'"{HOSTILE}"'))
    write_run(results, facts("lora_only"), "fake", answers(range(9)))
    return pages.report_html(make_report([results]))


def test_nothing_outside_is_referenced(html):
    page = Page(html)
    assert page.count("script") == page.count("iframe") == page.count("style") - 1 == 0
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "background"}:
                assert value.startswith(("#", "data:")), (tag, name, value[:80])
            if name in {"style", "clip-path"}:
                assert re.sub(r"url\(#[\w-]+\)", "", value).count("url(") == 0, (tag, name, value[:80])
                assert not re.search(r"@import|expression|https?:", value)
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert not re.search(r"@import|url\(|expression|https?:", style)
    assert "prefers-color-scheme: dark" in style


def test_it_begins_with_the_verdicts_names_are_text_and_it_stays_small(html):
    text = " ".join("".join(Page(html).text).split())
    first = "FastV 25 % + S16K4 router against FastV 15.6 %, both at 15.625% of the KV: "
    assert text.index(first) < text.index("Scores are computed")
    for words in ("MMBench", "3-mean", "7-mean", "Δ to FastV 15.6 %", "fastv25_s16k4_anchor", "n = 280", HOSTILE):
        assert words in text
    assert "<script" not in html
    assert "&lt;script&gt;alert(1) &amp; &lt;img src=x" in html
    assert len(html) < 600_000


def test_scores_that_compression_could_not_change_are_grey(tmp_path):
    late = facts("late", 0.2, acts="after prefill", eviction="snapkv 0.2")
    write_run(tmp_path, late, "pope", answers(range(9)), new_tokens=1)
    page = Page(pages.report_html(make_report([tmp_path])))
    cells = [attributes.get("class") or "" for tag, attributes in page.elements if tag == "td"]
    assert any("moot" in words for words in cells)
    assert "22.50 †" in "".join(page.text)


LONG = "an_arm_with_a_name_that_goes_on_and_on" * 4


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path, facts("lora"), "pope", answers(range(40)))
    write_run(tmp_path, facts("anchor", 0.25, reducer="fastv 0.25"), "pope", answers(range(20)))
    for name, right in (("better", 30), ("worse", 5), ("same", 20)):
        write_run(tmp_path, facts(name, 0.25, reducer="x 0.5", anchor="anchor"), "pope", answers(range(right)))
    return tmp_path


@pytest.fixture
def report(folder):
    return make_report([folder])


def test_points_of_a_curve(report):
    (curve,) = [curve for curve in report.curves if curve.name == "fastv"]
    figure = pages.curve_chart([curve], pages.series_of(report))
    (axes,) = figure.axes
    assert axes.lines[0].get_xydata().tolist() == [[100, 100], [25, 50]]
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["25%", "50%", "100%"]
    assert axes.get_ylabel() == "score, %"
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {"FastV"}
    whiskers = [collection.get_segments()[0] for collection in axes.collections]
    error = 100 * curve.points[1].estimate.error
    assert whiskers[1][:, 1].tolist() == pytest.approx([50 - error, 50 + error])
    assert clipped_texts(figure) == []


def test_differences_stand_at_their_numbers_in_the_arms_colours(report):
    (table,) = report.tables
    series = pages.series_of(report)
    figure = pages.difference_chart(table, "pope", series)
    (axes,) = figure.axes
    arms = ("better", "same", "worse")
    names = [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()]
    assert names == [f"x 50 % ({name})" for name in arms]
    *points, zero = axes.lines
    assert [point.get_xdata()[0] for point in points] == pytest.approx([25, 0, -37.5])
    assert list(zero.get_xdata()) == [0, 0]
    assert [point.get_color() for point in points] == [series[name].color for name in arms]
    (low, _), (high, _) = axes.collections[0].get_segments()[0]
    its = next(row.differences["pope"] for row in table.rows if row.arm.name == "better")
    assert (low, high) == pytest.approx((100 * its.low, 100 * its.high))
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first at the top
    assert pages.difference_chart(table, "3-mean", series) is None
    assert clipped_texts(figure) == []


@pytest.mark.slow
def test_an_arm_has_one_look_of_its_own_and_curves_one_colour(folder):
    for keep in (0.5, 0.1):
        write_run(folder, facts(f"fastv{keep}", keep, reducer=f"fastv {keep}"), "pope", answers(range(int(30 * keep))))
    for i in range(6):
        write_run(folder, facts(f"a{i}", 0.5, reducer=f"y{i} 0.5"), "pope", answers(range(i)))
    report = make_report([folder])
    series = pages.series_of(report)
    assert set(series) == {arm.name for arm in report.arms}
    assert len({(its.color, its.turn) for its in series.values()}) == len(series) > len(COLORS)
    assert len({series[arm].color for arm in ("anchor", "fastv0.5", "fastv0.1")}) == 1
    (curve,) = [curve for curve in report.curves if curve.name == "fastv"]
    figure = pages.curve_chart([curve], series)
    line, *points = figure.axes[0].lines[:1] + figure.axes[0].lines[1::3]
    assert line.get_color() == series["anchor"].color
    assert {point.arm.name for point in curve.points} == {"lora", "anchor", "fastv0.5", "fastv0.1"}
    assert [point.get_color() for point in points][1:] == [line.get_color()] * 3
    assert clipped_texts(pages.curve_chart(report.curves, series)) == []


@pytest.mark.slow
def test_names_are_whole_text(report):
    names = [LONG, "$\\frac{<b>}$", "<script>alert(1)</script>", "\x07\ud800 & co", "名前"]
    pairs = zip(pages.series_of(report).items(), names, strict=True)
    titled = {arm: its._replace(title=title) for (arm, its), title in pairs}
    for figure in (pages.difference_chart(report.tables[0], "pope", titled), pages.curve_chart(report.curves, titled)):
        assert clipped_texts(figure) == []
        text = svg_of(figure, "name", "<&>", "more")
        assert not re.search(r"<(script|b)>", text)
        drawn = ElementTree.fromstring(text)
        assert drawn.get("role") == "img"
        assert [element.text for element in drawn][:2] == ["<&>", "more"]
        ids = [element.get("id") for element in drawn.iter() if element.get("id")]
        assert len(ids) == len(set(ids))
        assert all(name.startswith("name-") for name in ids)
        links = [value for element in drawn.iter() for key, value in element.items() if key.endswith("href")]
        assert all(link.removeprefix("#") in ids for link in links)
