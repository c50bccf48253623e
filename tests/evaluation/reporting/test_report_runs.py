"""What is read from results folders, which are data: whatever stands in them is reported or refused in words."""

import csv
import io
import json
from pathlib import Path

import pytest

from subtoken_train.evaluation.reporting.exports import report_csv, report_latex, report_markdown
from subtoken_train.evaluation.reporting.page import report_html
from subtoken_train.evaluation.reporting.report import make_report
from subtoken_train.evaluation.reporting.runs import read_results
from tests.hostile.grammar import changed
from tests.support.refusals import refuses
from tests.support.report_results import answers, facts, write_run

MANIFEST, SAMPLES = "manifest.json", "samples-0-of-1.jsonl"


@pytest.fixture
def results(tmp_path) -> Path:
    """An arm below its anchor on one task."""
    arm = facts("arm", 0.2, anchor="anchor", reducer="fastv 0.25", groups="S16K4 linear")
    write_run(tmp_path / "results", facts("anchor", 0.25), "fake", answers(range(40)))
    write_run(tmp_path / "results", arm, "fake", answers(range(20)))
    return tmp_path / "results"


def report(folder: Path) -> str | None:
    """All formats of a folder's report, or the message of the worded error."""
    try:
        made = make_report([folder])
        for write in (report_csv, report_latex, report_markdown, report_html):
            write(made)
    except ValueError as error:
        return str(error)
    return None


def refused(*folders) -> str:
    return refuses("", read_results, list(folders))


def change(results: Path, place: tuple, value: object, arm: str = "arm") -> str | None:
    """The report after a key of an arm's manifest, or of its first record (one word), was changed."""
    path = results / arm / "fake" / (MANIFEST if place[0] in ("arm", "rows") else SAMPLES)
    first, *rest = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    path.write_text("\n".join([json.dumps(changed(json.loads(first), place, value)), *rest, ""]))
    return report(results)


def test_scores_are_computed_anew_and_an_arm_is_spread_over_folders(tmp_path):
    place = write_run(tmp_path / "one", facts("a-seed0", seed=0), "pope", answers(range(30)))
    (place / "scores.json").write_text('{"accuracy": 0.99}')
    write_run(tmp_path / "two", facts("a-seed1", seed=1, adapter="elsewhere"), "pope", answers(range(20)))
    write_run(tmp_path / "two", facts("a-seed0", seed=0), "gqa", answers(range(10)))
    write_run(tmp_path / "two", facts("less", 0.25), "pope", answers(range(30)), overhead=80)
    arm, less = read_results([tmp_path / "one", tmp_path / "two"])
    assert (arm.name, {task: list(runs) for task, runs in arm.runs.items()}) == ("a", {"pope": [0, 1], "gqa": [0]})
    run = arm.runs["pope"][0]
    assert run.scores["accuracy"] == pytest.approx(0.75)
    assert run.samples.score.sum() == 30  # the records say 0.123 each
    assert len(run.samples) == run.manifest.rows
    assert run.is_mean
    assert (run.cost.shares["with_index"], run.cost.shares["prompt"], run.cost.acted) == (1, 1, False)
    cost = less.runs["pope"][None].cost
    shares = {"with_index": 8_080 / 32_000, "measured": 8_080 / 32_000, "prompt": 16_080 / 40_000, "entries": 0.25}
    assert (cost.shares, cost.acted) == (shares, True)


@pytest.mark.parametrize(
    ("task", "given", "key", "words"),
    [
        ("poppe", {}, "answer", "poppe/manifest.json: unknown task 'poppe'. Did you mean 'pope'?"),
        ("pope", {"rows": 39}, "answer", "holds 40 samples, but its manifest says 39"),
        ("pope", {"primary": "acuracy"}, "answer", "unknown score 'acuracy'. Did you mean 'accuracy'?"),
        ("pope", {}, "other", "its references and predictions cannot be scored (not of the form"),
    ],
)
def test_a_run_that_cannot_be_scored(tmp_path, task, given, key, words):
    path = write_run(tmp_path, facts("a"), task, answers(range(3)), **given) / SAMPLES
    path.write_text(path.read_text().replace('"answer"', f'"{key}"'))
    assert words in refused(tmp_path)


@pytest.mark.parametrize(
    ("changes", "given", "words"),
    [
        ({"seed": 1}, {"digest": "other"}, "arm a answered different samples of pope in"),
        ({"seed": 0}, {}, "arm a, seed 0 appears twice on pope"),
        ({"nominal": 0.5, "seed": 3}, {}, "arm a has acts in prefill, but - elsewhere"),
        ({"seed": 4, "anchor": "b"}, {}, "arm a has anchor b, but None elsewhere"),
    ],
)
def test_runs_that_do_not_belong_together(tmp_path, changes, given, words):
    write_run(tmp_path / "one", facts("a", seed=0), "pope", answers(range(3)))
    write_run(tmp_path / "two", facts("a", **changes), "pope", answers(range(3)), **given)
    assert words in refused(tmp_path / "one", tmp_path / "two")
    assert "holds no results (ARM/TASK/manifest.json" in refused(tmp_path / "absent")


BLANK = "arm: backbone is {!r}, which 'subtoken-train evaluate' does not write"


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("kv_bytes",), "12", "kv_bytes is '12'; it must be a whole number"),
        (("kv_bytes",), -5, "line 1: kv_bytes is -5"), (("batch_size",), 0, "batch_size is 0"),
        (("values_after",), True, "values_after is True"), (("prediction",), [1, None], "prediction"),
        (("reference",), [], "reference is []"), (("score",), "1e999", "score is"),
        *((("arm", "backbone"), name, BLANK.format(name)) for name in ("", " ", "\n")),
    ],
)  # fmt: skip
def test_what_a_file_says_is_worded(results, place, value, words):
    assert words in str(change(results, place, value))


@pytest.mark.parametrize(
    ("name", "shown"), [("\x1b[31mred", "\\x1b[31mred"), ("a\nb", "a\\nb"), ("\u202egnp", "\\u202egnp"), ("ä b", "ä b")]
)
def test_names_that_act_on_a_terminal_are_written_out(results, name, shown):
    assert change(results, ("arm", "adapter"), name) is None
    rows = list(csv.DictReader(io.StringIO(report_csv(make_report([results])))))
    assert {row["adapter"] for row in rows if row["arm"] == "arm"} == {shown}


def test_answers_whose_manifest_is_gone_are_not_left_out(results):
    (results / "arm" / "fake" / MANIFEST).unlink()
    assert "arm/fake holds answers and no manifest.json" in str(report(results))


@pytest.mark.parametrize("anchors", [("arm", "anchor"), ("missing", None), ("anchor", "arm")])
def test_anchors_of_any_shape(results, anchors):
    """Itself, one that is not there, and a circle."""
    for name, anchor in zip(("arm", "anchor"), anchors, strict=True):
        made = change(results, ("arm", "anchor"), anchor, name)
    assert made is None
