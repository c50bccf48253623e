"""The HTML page: balanced, self-contained, escaped, with tables and plots; a browser has nothing to say."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser

import pytest

from subtoken_train.evaluation.reporting.page import report_html
from subtoken_train.evaluation.reporting.report import make_report
from subtoken_train.evaluation.reporting.score_tables import PAPER_TASKS
from tests.support.drawings import OPTIONS, find_browser
from tests.support.report_results import answers, facts, paper_grid, register, write_run

VOID = {"meta", "link", "img", "br"}
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
        if tag not in VOID:
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
    with pytest.MonkeyPatch.context() as monkeypatch:
        register(monkeypatch, *PAPER_TASKS, "ruler")
        paper_grid(results, PAPER_TASKS, routed=range(20))
        hostile = facts("hostile", 0.1, reducer="fastv 0.1", anchor="fastv25_s16k4_anchor")
        manifest = write_run(results, hostile, "pope", answers(range(3))) / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"hostile"', f'"{HOSTILE}"'))
        write_run(results, facts("lora_only"), "ruler", answers(range(9)))
        return report_html(make_report([results]))


@pytest.mark.slow
def test_tables_and_plots(html):
    page = Page(html)
    assert page.count("table") == 2 + 2 + 2 + 2 + 8 + 1  # scores, budgets, times, curves and points, kinds, how asked
    charts = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(charts) == 2 + 1 + 1 + 8  # both means' differences, pope's alone are in the table, curves, kinds
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    for chart in charts:
        assert chart["role"] == "img"
        assert set(chart["aria-labelledby"].split()) <= ids
    assert len(ids) == sum("id" in attributes for _, attributes in page.elements)
    assert page.count("img") == 0
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links
    assert {link.removeprefix("#") for link in links} <= ids


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


def test_scores_that_compression_could_not_change_are_grey(tmp_path, monkeypatch):
    register(monkeypatch, "pope")
    late = facts("late", 0.2, acts="after prefill", eviction="snapkv 0.2")
    write_run(tmp_path, late, "pope", answers(range(9)), new_tokens=1)
    page = Page(report_html(make_report([tmp_path])))
    cells = [attributes.get("class") or "" for tag, attributes in page.elements if tag == "td"]
    assert any("moot" in words for words in cells)
    assert "22.50 †" in "".join(page.text)


def test_a_browser_finds_no_error(html, tmp_path):
    browser = find_browser()
    path = tmp_path / "report.html"
    path.write_text(html, encoding="utf-8")
    options = [*OPTIONS, "--enable-logging=stderr", f"--user-data-dir={tmp_path}/p"]
    command = [browser, *options, "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert "7-mean" in done.stdout
