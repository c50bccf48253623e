"""Arms with a threshold: names, what is promised and what is measured, anchors by the recorded mean, reports."""

from __future__ import annotations

import csv
import io
import statistics
from dataclasses import replace

import pytest

from subtoken_train.artifact.identity import identify
from subtoken_train.datasets.scene_files import write_scene_split
from subtoken_train.evaluation.reporting.exports import HEADINGS, SPREAD, report_csv
from subtoken_train.evaluation.reporting.report import cell_text, make_report, sections
from subtoken_train.evaluation.results import read_samples
from subtoken_train.evaluation.runner.arms import prepare, with_anchors
from subtoken_train.evaluation.runner.dry_run import check_lines, dry_run, planned_adapter
from subtoken_train.evaluation.runner.run import run_grid
from subtoken_train.evaluation.runner.spec import expand_arms
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.thresholds import ThresholdRecord
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.inference.compression import method_record
from subtoken_train.inference.pool import ModelPool, load_backbone
from tests.support.eval_runs import ROUTED, WHOLE, scenes_grid
from tests.support.kvzap_files import written

METHOD = {"eviction": "keydiff"}


@pytest.fixture
def scenes(tmp_path):
    write_scene_split(tmp_path / "scenes", "test", 20, seed=3)
    return tmp_path / "scenes"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A file of the shipped models' backbone: 40 % on average."""
    family = load_backbone(str(WHOLE.adapter)).family
    numbers = ThresholdRecord(-0.1, 4, method_record(build_eviction("keydiff")), 0.4, 0.05)
    path = tmp_path_factory.mktemp("made") / "made.json"
    return written(path, "threshold", numbers, identify(family, BackboneConfig(path="its own")))


def test_names_and_facts_say_what_is_known(record):
    keeps = [{"threshold": 0.5}, {"threshold": -0.1, "window": 4}, f"threshold:{record}"]
    specs = expand_arms({"adapter": WHOLE.adapter, **METHOD, "eviction_keep": keeps[:2]})
    arms = prepare([*specs, replace(WHOLE, name="known", **METHOD, eviction_keep=keeps[2])], ModelPool())
    facts = [arm.facts for arm in arms]
    assert [each.name.partition("keydiff")[2] for each in facts[:2]] == ["_threshold=0.5", "_threshold=-0.1_window=4"]
    assert [each.eviction for each in facts] == [
        "keydiff threshold=0.5", "keydiff threshold=-0.1 window=4", "keydiff threshold=-0.1 window=4 mean 0.4",
    ]  # fmt: skip
    assert [each.nominal_kv for each in facts] == [1.0, 1.0, 0.4]
    assert [each.by_threshold for each in facts] == [True] * 3
    assert [each.promises for each in facts] == [False, False, True]
    assert [arm.calibration_sha256 is None for arm in arms] == [True, True, False]


def test_an_anchor_keeps_the_recorded_mean(record):
    pool = ModelPool()
    arm = replace(ROUTED, **METHOD, eviction_keep=f"threshold:{record}")
    arms, notes = with_anchors(prepare([arm], pool), pool)
    assert notes == []
    assert arms[1].spec.eviction_keep == 0.4
    assert arms[1].compression().round_up
    assert arms[0].facts.anchor == arms[1].facts.name
    assert arms[0].facts.nominal_kv == arms[1].facts.nominal_kv == pytest.approx(0.4 * 0.15625)
    own = replace(arms[1].spec, name="written", eviction_keep="0.4")
    arms, _ = with_anchors(prepare([arm, own], pool), pool)
    assert [each.facts.anchor for each in arms] == ["written", None]
    unknown = replace(arm, eviction_keep={"threshold": -0.1, "window": 4})
    arms, (note,) = with_anchors(prepare([unknown], pool), pool)
    assert len(arms) == 1
    assert "has no matched anchor: its threshold=-0.1 window=4 has no recorded mean to match" in note


def test_a_check_says_that_bytes_are_measured(record, scenes, tmp_path):
    keeps = ["0.5", {"threshold": 0.1}, f"threshold:{record}"]
    specs = [replace(WHOLE, name=f"arm{i}", **METHOD, eviction_keep=keep) for i, keep in enumerate(keeps)]
    grid = scenes_grid(scenes, tmp_path / "out", *specs)
    lines = "\n".join(check_lines(grid, dry_run(grid, planned_adapter)))
    assert "keydiff 0.5, query_aware, KV 50.000%" in lines
    assert "keydiff threshold=0.1, query_aware, KV measured: a threshold promises no bytes" in lines
    assert "mean 0.4, query_aware, KV measured, 40.000% on average of 1 prompts of tests" in lines


def test_a_check_lists_a_file_that_is_not_there(scenes, tmp_path):
    file = tmp_path / "none.json"
    spec = replace(WHOLE, name="arm", **METHOD, eviction_keep=f"threshold:{file}")
    checked = dry_run(scenes_grid(scenes, tmp_path / "out", spec), planned_adapter)
    how = f"subtoken-train calibrate threshold --adapter {WHOLE.adapter} --option eviction=keydiff --out {file}"
    assert dict(checked.wanted) == {f"calibration {file}": how}
    with pytest.raises(ValueError, match=r"none.json is not a file; 'subtoken-train calibrate threshold' writes one"):
        prepare([spec], ModelPool())


def test_a_report_states_measured_bytes_with_their_spread(record, scenes, tmp_path):
    keeps = [0.5, {"threshold": -0.1, "window": 4}, f"threshold:{record}"]
    specs = [replace(WHOLE, name=f"arm{i}", **METHOD, eviction_keep=keep) for i, keep in enumerate(keeps)]
    folders = run_grid(scenes_grid(scenes, tmp_path / "out", *specs, limit=6))
    shares = [
        (each.region_bytes - each.index_bytes) / each.region_dense_bytes for each in read_samples(folders[1]).values()
    ]
    spread = statistics.stdev(shares)
    assert spread > 0
    report = make_report([tmp_path / "out"])
    rows = {row["id"]: row for row in sections(report)[0].written(cell_text).to_dict("records")}
    assert (rows["arm0"]["KV nominal"], rows["arm0"]["KV measured"]) == ("50.000%", "50.000%")
    assert (rows["arm1"]["KV nominal"], rows["arm2"]["KV nominal"]) == ("measured", "40.000%")
    measured = f"{statistics.fmean(shares):.3%} ± {spread:.3%}"  # pictures of one size
    assert rows["arm1"]["KV measured"] == rows["arm2"]["KV measured"] == measured
    table = list(csv.DictReader(io.StringIO(report_csv(report))))
    assert tuple(table[0]) == (*HEADINGS, SPREAD)
    told = {row["arm"]: row[SPREAD] for row in table}
    assert told == {"arm0": "", "arm1": f"{spread:.6f}", "arm2": f"{spread:.6f}"}
    assert "KeyDiff threshold=-0.1 window=4 mean 40 %" in report.titles["arm2"]
