"""Anchors by the ledger, trained or the arm's own LoRA token-only; arms with a threshold, and their reports."""

import csv
import io
import statistics
from dataclasses import replace

import pytest

from subtoken_train.artifact.folder import identify
from subtoken_train.datasets.scenes import write_scene_split
from subtoken_train.evaluation.reporting.exports import HEADINGS, SPREAD, report_csv
from subtoken_train.evaluation.reporting.report import cell_text, make_report, sections
from subtoken_train.evaluation.results import read_samples
from subtoken_train.evaluation.runner.arms import prepare, solve, with_anchors
from subtoken_train.evaluation.runner.dry_run import dry_run, planned_adapter
from subtoken_train.evaluation.runner.run import run_grid
from subtoken_train.evaluation.runner.spec import ArmSpec, expand_arms
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.thresholds import ThresholdRecord
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.inference.compression import method_record
from subtoken_train.inference.pool import ModelPool, load_backbone
from tests.support.eval_runs import ADAPTERS, ANCHOR, ROUTED, WHOLE, scenes_grid
from tests.support.prompt_views import written
from tests.support.refusals import refuses, refusing
from tests.support.sampling import sampled

EVICTED = {"eviction": "snapkv", "eviction_keep": 0.5, "scope": "visual"}


@pytest.fixture(scope="module")
def pool():
    return ModelPool()


def kept(arm):
    """Tokens that the last layer holds."""
    return arm.reducer.layer_tokens(arm.tokens, arm.shape.num_layers)[-1]


OWN = "tiny_fastv25_s16k4-seed0"
TRAINED, UNTRAINED = "tiny_fastv25_s16k4_anchor-seed0", f"{OWN}-untrained_anchor"


def names(specs, pool):
    arms, notes = with_anchors(prepare(specs, pool), pool)
    return {arm.facts.name: arm.facts.anchor for arm in arms}, arms, notes


def test_a_trained_anchor_is_taken_and_without_one_the_own_lora_runs_token_only(pool):
    anchors, _, notes = names([ANCHOR, WHOLE, ROUTED], pool)
    assert anchors == {TRAINED: None, "tiny_lora_only-seed0": None, OWN: TRAINED}
    assert notes == []
    anchors, (arm, anchor), _ = names([ROUTED], pool)
    assert anchors == {OWN: UNTRAINED, UNTRAINED: None}
    assert (kept(anchor), anchor.routing, anchor.facts.trained) == (10, None, False)
    assert anchor.reducer.round_up
    assert anchor.facts.nominal_kv == arm.facts.nominal_kv == 0.15625


@sampled("other", [{"adapter": WHOLE.adapter}, {"backbone": "checkpoints/tiny-llava"}], every=2)
def test_another_lora_that_was_not_trained_so_is_no_anchor(pool, other):
    kept = {"reducer": "fastv", "keep_ratio": 0.15625, "reducer_options": {"round_up": True}}
    other = ArmSpec(**other, **kept, name="other")
    assert names([other, ROUTED, ANCHOR], pool)[0][OWN] == TRAINED
    assert names([other, ROUTED], pool)[0][OWN] == UNTRAINED


def test_an_anchor_keeps_as_many_of_any_prompt(pool):
    """0.151 of 64 tokens, rounded up, are 10, too; of 640 they are 97, and the arm's bytes are those of 100."""
    fewer = replace(ROUTED, name="fewer", selector="none", keep_ratio=0.151, reducer_options={"round_up": True})
    anchors, arms, _ = names([fewer, replace(ROUTED, name="down", selector="none", keep_ratio=0.16), ROUTED], pool)
    assert [kept(arm) for arm in arms] == [10, 10, 16, 10]
    assert anchors[OWN] == UNTRAINED


def test_of_several_anchors_that_of_the_same_seed_is_taken(pool):
    arms = prepare([ROUTED, replace(ANCHOR, name="first"), replace(ANCHOR, name="second")], pool)
    seeds = [replace(arm, facts=replace(arm.facts, seed=seed)) for arm, seed in zip(arms, (1, 0, 1), strict=True)]
    assert [arm.facts.anchor for arm in with_anchors(seeds, pool)[0]] == ["second", None, None]


def test_another_reducer_takes_over_the_budget(pool):
    drawn, none = prepare([replace(ROUTED, reducer="random"), replace(ROUTED, reducer="none", name="n")], pool)
    assert (drawn.facts.reducer, kept(drawn)) == ("random 0.25", 16)
    assert (none.facts.reducer, kept(none)) == ("-", 64)


def test_one_anchor_serves_several_arms_of_a_budget(pool):
    """It is named after the trained arm, whichever comes first."""
    random, norm = replace(ROUTED, selector="random", seed=3), replace(ROUTED, selector="value_norm")
    anchors, arms, _ = names([random, ROUTED, norm], pool)
    assert len(arms) == 4
    assert set(anchors.values()) == {None, UNTRAINED}


@pytest.mark.slow
def test_compression_after_prefill_must_be_the_same(pool):
    evicted, trained = replace(ROUTED, **EVICTED), replace(ANCHOR, **EVICTED)
    anchors, arms, _ = names([ANCHOR, ROUTED, evicted], pool)
    assert anchors[OWN] == TRAINED
    name = anchors[f"{OWN}-snapkv0.5_visual"]
    assert name.endswith("untrained_anchor")
    assert next(arm for arm in arms if arm.facts.name == name).facts.eviction == "snapkv 0.5"
    assert names([trained, evicted], pool)[0][f"{OWN}-snapkv0.5_visual"] == f"{TRAINED}-snapkv0.5_visual"


def test_without_a_reducer_there_is_none_and_it_is_said(pool):
    anchors, _, (note,) = names([ArmSpec(adapter=f"{ADAPTERS}/tiny_none100_s16k4")], pool)
    assert list(anchors.values()) == [None]
    assert "no token reducer" in note


def test_layers_below_the_cut_are_paid_for(pool):
    """Six layers, cut at 2: both arms hold every token there; above it the anchor keeps r (1 + K/S) / 2 = 10 of 64."""
    (arm,) = prepare([replace(ROUTED, reducer="fastv", reducer_options={"stage": "decoder"})], pool)
    solved = solve(arm)
    assert arm.reducer.cut_layer(4) == 2
    assert solved.kept_tokens(arm.tokens) == 10
    assert arm.facts.nominal_kv == pytest.approx((2 + 4 * 0.15625) / 6)


def test_what_is_read_in_part_is_promised_whole(pool):
    """A method that frees nothing promises nothing of its budget."""
    spec = ArmSpec(backbone="checkpoints/tiny-llama", eviction="quest_steps", eviction_keep=0.25)
    (reads,), (evicts,) = (prepare([each], pool) for each in (spec, replace(spec, eviction="snapkv")))
    assert (reads.facts.nominal_kv, evicts.facts.nominal_kv) == (1, 0.25)


test_mistakes_are_worded = refusing(
    [
        (ROUTED, "two arms are named"),
        (replace(ROUTED, selector="linnear"), "selector"),
        (replace(ROUTED, reducer_options={"stag": "decoder"}), "unknown setting of fastv 'stag'. Did you mean 'stage'"),
        (
            replace(WHOLE, eviction="aircache", eviction_keep=0.1, protocol="context_first"),
            "compresses before the question is seen",
        ),
        (ArmSpec(adapter="nowhere/at/all"), "nowhere/at/all is not an adapter folder"),
        (ArmSpec(backbone=f"{ADAPTERS}/tiny_lora_only"), "is an adapter; write adapter:"),
        (replace(WHOLE, reducer="fastv"), "needs keep_ratio"),
        (replace(WHOLE, keep_ratio=0.25), "keep_ratio 0.25 needs a reducer"),
    ],
    lambda spec, pool: prepare([spec, spec], pool),
)


METHOD = {"eviction": "keydiff"}


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
    arms, _ = with_anchors(prepare([arm, replace(arms[1].spec, name="written", eviction_keep="0.4")], pool), pool)
    assert [each.facts.anchor for each in arms] == ["written", None]
    arms, (note,) = with_anchors(prepare([replace(arm, eviction_keep={"threshold": -0.1, "window": 4})], pool), pool)
    assert len(arms) == 1
    assert "has no matched anchor: its threshold=-0.1 window=4 has no recorded mean to match" in note


def test_a_check_lists_a_file_that_is_not_there(tmp_path):
    write_scene_split(tmp_path / "scenes", "test", 20, seed=3)
    file = tmp_path / "none.json"
    spec = replace(WHOLE, name="arm", **METHOD, eviction_keep=f"threshold:{file}")
    checked = dry_run(scenes_grid(tmp_path / "scenes", tmp_path / "out", spec), planned_adapter)
    how = f"subtoken-train calibrate threshold --adapter {WHOLE.adapter} --option eviction=keydiff --out {file}"
    assert dict(checked.wanted) == {f"calibration {file}": how}
    refuses(r"none.json is not a file; 'subtoken-train calibrate threshold' writes one", prepare, [spec], ModelPool())


def test_a_report_states_measured_bytes_with_their_spread(record, tmp_path):
    write_scene_split(tmp_path / "scenes", "test", 20, seed=3)
    keeps = [0.5, {"threshold": -0.1, "window": 4}, f"threshold:{record}"]
    specs = [replace(WHOLE, name=f"arm{i}", **METHOD, eviction_keep=keep) for i, keep in enumerate(keeps)]
    found = read_samples(run_grid(scenes_grid(tmp_path / "scenes", tmp_path / "out", *specs, limit=6))[1]).values()
    shares = [(each.region_bytes - each.index_bytes) / each.region_dense_bytes for each in found]
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
    assert {row["arm"]: row[SPREAD] for row in table} == {"arm0": "", "arm1": f"{spread:.6f}", "arm2": f"{spread:.6f}"}
    assert "KeyDiff threshold=-0.1 window=4 mean 40 %" in report.titles["arm2"]
