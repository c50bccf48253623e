"""Results folders are data: whatever stands in them, a report is made or one worded error is given."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from subtoken_train.evaluation.reporting.exports import report_csv, report_latex, report_markdown
from subtoken_train.evaluation.reporting.page import report_html
from subtoken_train.evaluation.reporting.report import make_report
from tests.support.report_results import answers, facts, register, write_run

ODD = [None, -1, 10**30, "x", [], {"a": {}}]


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """An arm below its anchor on one task."""
    register(monkeypatch, "fake")
    anchor = facts("anchor", 0.25)
    arm = facts("arm", 0.2, anchor="anchor", reducer="fastv 0.25", groups="S16K4 linear")
    write_run(tmp_path / "results", anchor, "fake", answers(range(40)))
    write_run(tmp_path / "results", arm, "fake", answers(range(20)))
    return tmp_path / "results"


def report(folder: Path, paper: Path | None = None) -> str | None:
    """All formats of a folder's report, or the message of the worded error."""
    try:
        made = make_report([folder], paper)
        for write in (report_csv, report_latex, report_markdown, report_html):
            write(made)
    except ValueError as error:
        return str(error)
    return None


def places(content: object, path: tuple = ()) -> list[tuple]:
    """Every key of nested groups."""
    if not isinstance(content, dict):
        return []
    return [place for key, value in content.items() for place in ((*path, key), *places(value, (*path, key)))]


def with_value(content: dict, place: tuple, value: object) -> str:
    made = json.loads(json.dumps(content))
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return json.dumps(made)


@pytest.mark.slow
def test_manifests_with_any_value(results):
    assert report(results) is None
    path = results / "arm" / "fake" / "manifest.json"
    content = json.loads(path.read_text())
    refused = {}
    for place in places(content):
        for value in ODD:
            path.write_text(with_value(content, place, value))
            refused[(*place, repr(value))] = report(results)
    for place in (("arm", "nominal_kv"), ("rows",), ("schema",), ("arm", "reducer"), ("arm", "groups"), ("primary",)):
        assert all(refused[(*place, repr(value))] for value in (None, -1, "x", [], {"a": {}})), place


@pytest.mark.slow
def test_records_with_any_value(results):
    path = next((results / "arm" / "fake").glob("samples-*.jsonl"))
    lines = path.read_text().splitlines()
    content = json.loads(lines[0])
    for place in places(content):
        for value in ODD[::2]:
            path.write_text("\n".join([with_value(content, place, value), *lines[1:]]) + "\n")
            report(results)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("kv_bytes", "12", "kv_bytes is '12'; it must be a whole number"),
        ("kv_bytes", -5, "kv_bytes is -5"),
        ("batch_size", 0, "batch_size is 0"),
        ("values_after", True, "values_after is True"),
        ("kept_visual", "xyz", "must be hexadecimal digits"),
        ("kept_visual", "0", "must be hexadecimal digits"),
        ("prediction", [1, None], "prediction"),
        ("reference", [], "reference is []"),
        ("score", "1e999", "score is"),
    ],
)
def test_what_a_record_says_is_worded(results, key, value, words):
    path = next((results / "arm" / "fake").glob("samples-*.jsonl"))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([with_value(json.loads(lines[0]), (key,), value), *lines[1:]]) + "\n")
    message = report(results)
    assert message is not None
    assert "line 1" in message
    assert words in message


@pytest.mark.parametrize(
    ("name", "shown"), [("\x1b[31mred", "\\x1b[31mred"), ("a\nb", "a\\nb"), ("\u202egnp", "\\u202egnp"), ("ä b", "ä b")]
)
def test_names_that_act_on_a_terminal_are_written_out(results, name, shown):
    path = results / "arm" / "fake" / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "arm": {**content["arm"], "adapter": name}}))
    rows = list(csv.DictReader(io.StringIO(report_csv(make_report([results])))))
    assert {row["adapter"] for row in rows if row["arm"] == "arm"} == {shown}


@pytest.mark.parametrize("name", ["", " ", "\n"])
def test_a_manifest_without_a_backbone(results, name):
    path = results / "arm" / "fake" / "manifest.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "arm": {**content["arm"], "backbone": name}}))
    assert f"arm: backbone is {name!r}, which 'subtoken-train evaluate' does not write" in str(report(results))


def test_answers_whose_manifest_is_gone_are_not_left_out(results):
    (results / "arm" / "fake" / "manifest.json").unlink()
    assert "arm/fake holds answers and no manifest.json" in str(report(results))


@pytest.mark.parametrize("anchors", [("arm", "anchor"), ("missing", None), ("anchor", "arm")])
def test_anchors_of_any_shape(results, anchors):
    """Itself, one that is not there, and a circle."""
    for name, anchor in zip(("arm", "anchor"), anchors, strict=True):
        path = results / name / "fake" / "manifest.json"
        path.write_text(with_value(json.loads(path.read_text()), ("arm", "anchor"), anchor))
    assert report(results) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "no list vlm_rows"),
        ('{"vlm_rows": [], "llm_rows": 3}', "no list llm_rows"),
        ('{"vlm_rows": [7], "llm_rows": []}', "vlm_rows[0] is 7"),
        ('{"vlm_rows": [], "llm_rows": [{"table": "3"}]}', "are missing"),
        ("[" * 5000, "nested deeper"),
        ("{", "invalid JSON"),
    ],
)
def test_files_of_printed_tables(results, tmp_path, content, words):
    (tmp_path / "paper.json").write_text(content)
    assert words in str(report(results, tmp_path / "paper.json"))
