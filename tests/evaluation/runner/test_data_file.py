"""Answering a data file: order, ledger, batch independence; records as scores; measures; the evaluate command."""

import json
import shutil
from unittest.mock import Mock

import pytest

from subtoken_train.artifact.card import model_index, score_table
from subtoken_train.cli.main import main
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS, write_scenes
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.evaluation.runner import data_file
from subtoken_train.evaluation.runner.data_file import answer_records, read_scores, written_run
from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.thresholds import Threshold
from subtoken_train.inference.compression import Compression
from subtoken_train.routing import RoutingConfig
from tests.support.commands import refused
from tests.support.helpers import compress
from tests.support.refusals import refusing
from tests.support.sampling import sampled

S16K4 = RoutingConfig(num_groups=16, kept_groups=4)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Scenes that nobody changes."""
    folder = tmp_path_factory.mktemp("drawn") / "scenes"
    write_scenes(folder, train=8, dev=24, test=8)
    return folder


@pytest.fixture
def questions(drawn, tmp_path):
    return shutil.copytree(drawn, tmp_path / "scenes") / "dev.json"


def routed(family, **reducer):
    return compress(family, S16K4, **{"name": "fastv", "keep_ratio": 0.25, **reducer}).eval()


@pytest.mark.slow
def test_answers_are_in_file_order_and_batch_independent(tiny_family, questions):
    backbone, records = routed(tiny_family), InstructionRecords(questions)
    together, alone = (answer_records(backbone, records, batch_size=size, max_new_tokens=6) for size in (24, 1))
    assert together["kinds"] == [records[i].kind for i in range(24)]
    told = [[run[name] for name in ("kinds", "predictions", "scores")] for run in (together, alone)]
    assert told[0] == told[1]
    assert list(together["measures"]) == ["token_accuracy", "log_likelihood", "place_f1", "color_f1", "digit_f1"]
    described = [kind in DESCRIPTION_KINDS for kind in together["kinds"]]
    for name, figures in together["measures"].items():
        assert figures == pytest.approx(alone["measures"][name], abs=1e-4)
        assert [figure is not None for figure in figures] == (described if name.endswith("f1") else [True] * 24)
    assert sum(map(len, data_file.scores_by_kind(together).values())) == 24
    assert len(answer_records(backbone, records, max_new_tokens=2, limit=5)["scores"]) == 5


@sampled(("stage", "nominal"), [("embeds", 0.15625), ("decoder", 0.578125)], every=2)
def test_nominal_and_realised_budgets_agree(tiny_family, questions, stage, nominal):
    backbone = routed(tiny_family, stage=stage)
    run = answer_records(backbone, InstructionRecords(questions), max_new_tokens=1)
    assert (run["nominal_kv"], run["realised_kv"]) == (pytest.approx(nominal), pytest.approx(nominal))
    assert (run["visual_tokens"], run["groups"]) == ("16/64", "S16K4 linear")
    visual = 24 * 64 * backbone.family.shape.token_bytes
    text = run["dense_kv_bytes"] - visual
    assert run["kv_bytes"] == pytest.approx(text + visual * nominal, rel=0.03)  # and the index


@pytest.mark.filterwarnings("ignore:.*nothing is left of a whole region")
def test_a_threshold_s_bytes_stand_with_their_spread(tiny_family, questions, tmp_path):
    backbone, limits = compress(tiny_family).eval(), {"batch_size": 8, "max_new_tokens": 2, "limit": 12}
    method = build_eviction("keydiff")
    settings = Compression(method, threshold=Threshold(-0.35, 4)), Compression(method, 0.5)
    records = InstructionRecords(questions)
    by_threshold, by_share = (answer_records(backbone, records, **limits, compression=x) for x in settings)
    assert "realised_deviation" not in written_run(by_share)
    deviation = by_threshold["realised_deviation"]
    assert deviation > 0
    data_file.write_runs(
        [written_run(by_threshold, arm="arm", data="questions", data_sha256="ab")], tmp_path / "runs.json"
    )
    facts = read_scores(tmp_path / "runs.json", "arm").own.facts
    assert facts["KV realised"] == f"{by_threshold['realised_kv']:.3%} ± {deviation:.3%}"


def test_what_an_answers_tokens_are_worth(tiny_family, questions):
    """A sample's figures are those of the full pass over prompt and answer that training's loss reads."""
    backbone, records = routed(tiny_family), InstructionRecords(questions)
    measures = answer_records(backbone, records, max_new_tokens=1, limit=8)["measures"]
    for i, record in enumerate(records[i] for i in range(8)):
        batch = Collator(tiny_family, 512)([record])
        wanted_q = batch.labels_BN[batch.labels_BN >= 0]
        logits_qV = backbone.logits(backbone.run(batch))[0, -len(wanted_q) - 1 : -1]
        logprob = logits_qV.log_softmax(-1).gather(1, wanted_q[:, None]).mean().item()
        assert measures["log_likelihood"][i] == pytest.approx(logprob, abs=1e-4)
        assert measures["token_accuracy"][i] == (logits_qV.argmax(-1) == wanted_q).double().mean().item()


def test_references_that_cannot_be_scored(tiny_family, questions):
    questions.write_text(json.dumps(json.loads(questions.read_text())[:3]))
    records, backbone = InstructionRecords(questions), compress(tiny_family).eval()
    online = Compression(build_eviction("h2o"), 12, unit="tokens", every=4)
    measures = answer_records(backbone, records, max_new_tokens=1, compression=online)["measures"]
    assert not measures.keys() & {"token_accuracy", "log_likelihood"}
    backbone.model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"the model gave NaN or infinite numbers for .*; there is no wider dtype"):
        answer_records(backbone, records, max_new_tokens=1)


def evaluated(capsys, out, *words) -> tuple[str, dict]:
    """What the command prints, and the first run of its file."""
    assert main(["evaluate", *map(str, words), "--max-new-tokens", "2", "--out", str(out)]) == 0
    return capsys.readouterr().out, json.loads(out.read_text())["runs"][0]


def test_evaluate_compares_two_adapters_question_by_question(vlm_adapter, questions, tmp_path, capsys):
    other, out = shutil.copytree(vlm_adapter, tmp_path / "other"), tmp_path / "out.json"
    printed, record = evaluated(capsys, out, "--adapter", vlm_adapter, "--adapter", other, "--data", questions)
    level = "+0.0 [+0.0, +0.0] points on the same 24 questions (95 % interval)"
    for words in ("16/64", "S4K1 linear", "15.625%", "exists_color", "KV bytes", "log_likelihood", "color_f1", level):
        assert words in printed
    assert record["eviction"] == "-"
    assert 0 < record["kv_bytes"] < 0.5 * record["dense_kv_bytes"]
    assert len(record["predictions"]) == len(record["scores"]) == len(record["measures"]["token_accuracy"]) == 24
    assert read_scores(out, record["arm"]).own.scores[-1].metric == "digit_f1"


def test_a_run_that_is_interrupted_goes_on_where_it_was(vlm_adapter, questions, tmp_path, capsys, monkeypatch):
    out, part, words = tmp_path / "o.json", tmp_path / "o.json.part0", ["--adapter", vlm_adapter, "--data", questions]
    words += ["--batch-size", 5]
    whole, stopped = evaluated(capsys, tmp_path / "whole.json", *words)[1], ["evaluate", *words, "--max-new-tokens", 2]
    with monkeypatch.context() as context:
        for kept, said in ((["--out", out], "the answers so far are beside"), ([], "nothing was written; the same")):
            twice = Mock(side_effect=[None, KeyboardInterrupt])
            context.setattr("subtoken_train.cli.evaluate.counter", lambda what, twice=twice: twice)
            assert main([*map(str, [*stopped, *kept])]) == 130
            assert said in capsys.readouterr().err
    part.write_text(part.read_text() + "[[{")  # a batch that was cut off
    assert "was begun with other questions" in refused(capsys, *stopped, "--out", out, "--limit", 7)
    asked = Mock(wraps=data_file.model_inputs)
    monkeypatch.setattr(data_file, "model_inputs", asked)
    found = evaluated(capsys, out, *words)[1]
    assert asked.call_count == 3  # of five batches
    assert {**found, "seconds": 0} == {**whole, "seconds": 0}
    assert not part.exists()


def test_what_is_stored_in_full_and_read_in_part_says_so(vlm_adapter, questions, tmp_path, capsys):
    reads = ["--eviction", "quest_steps", "--eviction-keep", "0.25", "--eviction-option", "page_size=4"]
    words = ["--backbone", vlm_adapter.parent / "backbone", "--data", questions, *reads]
    printed, record = evaluated(capsys, tmp_path / "out.json", *words)
    assert "read per step" in printed
    assert record["nominal_kv"] == record["realised_kv"]  # nothing is freed
    assert 0 < record["unread_bytes"] < record["kv_bytes"]


RUN = {
    "visual_tokens": "16/64", "groups": "S16K4 linear", "eviction": "-", "nominal_kv": 0.15625, "realised_kv": 0.15625,
    "kv_bytes": 25, "dense_kv_bytes": 100, "data": "dev.json", "data_sha256": "ab",
    "kinds": ["color", "list", "color", "color"], "scores": [1.0, 0.5, 0.0, 1.0],
}  # fmt: skip


def scores(tmp_path, *changes, arm="mine"):
    """What is read of an arm in a file of runs; the first is ``mine``."""
    (tmp_path / "m.json").write_text(json.dumps({"runs": [{**RUN, "arm": "mine", **each} for each in changes]}))
    return read_scores(tmp_path / "m.json", arm)


def test_scores_by_kind_and_measures_on_a_card(tmp_path):
    measures = {"log_likelihood": [-0.5, -1.5, -0.25, -0.75], "digit_f1": [None, 0.25, None, None]}
    evaluation = scores(tmp_path, {"arm": "older"}, {"measures": measures})
    assert (evaluation.data, evaluation.digest) == ("dev.json", "ab")
    assert [arm.name for arm in (evaluation.own, *evaluation.others)] == ["mine", "older"]
    together, color, listed, likelihood, digits = evaluation.own.scores
    assert (together.kind, together.metric, together.questions, together.mean) == ("all", "score", 4, 0.625)
    assert (color.metric, color.questions, color.mean) == ("exact_match", 3, 2 / 3)
    assert (color.low, color.high) == bootstrap_interval([1.0, 0.0, 1.0])
    assert (listed.metric, listed.questions) == ("f1", 1)
    assert (likelihood.kind, likelihood.metric, likelihood.mean) == ("all", "log_likelihood", -0.75)
    assert (digits.kind, digits.metric, digits.mean) == ("list", "digit_f1", 0.25)
    assert [score.metric for score in evaluation.others[0].scores] == ["score", "exact_match", "f1"]
    assert evaluation.own.facts["KV bytes, text and index included"] == "25.000%"
    low, high = bootstrap_interval(measures["log_likelihood"])
    table = score_table(evaluation).splitlines()
    assert f"| all (4, log_likelihood) | -0.750 [{low:.3f}, {high:.3f}] |  |" in table
    assert "| list (1, digit_f1) | 25.0 [25.0, 25.0] |  |" in table
    assert f"| all (4, score) | {together.cell} | {together.cell} |" in table
    results = {result.metric_type: result.metric_value for result in model_index(evaluation, "task")}
    assert (results["log_likelihood"], results["digit_f1"]) == (-0.75, 25.0)
    # no F1 of an attribute: no reference describes a scene, so that a kind of this name is an exact match
    plain = scores(tmp_path, {"measures": {"log_likelihood": measures["log_likelihood"]}}).own.scores
    assert [score.metric for score in plain[:3]] == ["exact_match"] * 3
    assert [score.kind for score in scores(tmp_path, {"kinds": ["color"] * 4}).own.scores] == ["color"]


OTHERS, FIGURES = "answered different questions; evaluate them in one call", "must have a figure or null"


test_records_that_make_no_scores = refusing(
    [
        ([{}, {"arm": "other", "data_sha256": "cd"}], "mine", OTHERS),
        ([{}, {"arm": "other", "kinds": ["color"] * 4}], "mine", OTHERS),
        ([{}, {"arm": "other", "data": "test.json"}], "mine", OTHERS),
        ([{}], "mina", r"unknown arm of .*m.json 'mina'. Did you mean 'mine'\?"),
        ([{"measures": {"digit_f1": [0.5]}}], "mine", FIGURES),
        ([{"measures": {"digit_f1": [None] * 4}}], "mine", FIGURES),
        ([{"measures": {"a | b": [0.5] * 4}}], "mine", "'a | b' is not the name of a measure"),
        *(([{"predictions": few}], "mine", "needs its kind and its prediction") for few in ([], ["a"] * 3)),
        ([{"measures": []}], "mine", r"measures is \[\]; it must be"),
        ([{"measures": {"digit_f1": [True] * 4}}], "mine", r"measures.digit_f1\[0\] is"),
    ],
    lambda runs, arm, tmp_path: scores(tmp_path, *runs, arm=arm),
)
