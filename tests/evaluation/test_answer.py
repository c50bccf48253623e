"""Answering a data file: order, ledger, batch independence, and the evaluate command."""

from __future__ import annotations

import json

import pytest

from subtoken_train.cli.main import main
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scene_files import write_scenes
from subtoken_train.evaluation.answer import answer_all
from subtoken_train.evaluation.report import arm_facts
from subtoken_train.inference.compression import Compression
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import FirstVisual, compress


@pytest.fixture
def questions(tmp_path):
    write_scenes(tmp_path / "scenes", train=8, dev=24, test=8)
    return tmp_path / "scenes" / "dev.json"


def test_answers_are_in_file_order_and_batch_independent(tiny_family, questions):
    backbone = compress(tiny_family, RoutingConfig(num_groups=16, kept_groups=4), name="fastv", keep_ratio=0.25).eval()
    records = InstructionRecords(questions)
    together = answer_all(backbone, records, batch_size=24, max_new_tokens=6)
    alone = answer_all(backbone, records, batch_size=1, max_new_tokens=6)
    assert [row.record_id for row in together.rows] == [record["id"] for record in json.loads(questions.read_text())]
    assert together.rows == alone.rows
    assert sum(map(len, together.by_kind().values())) == 24
    assert len(answer_all(backbone, records, max_new_tokens=2, limit=5).rows) == 5


@pytest.mark.parametrize(("stage", "nominal"), [("embeds", 0.15625), ("decoder", 0.578125)])
def test_nominal_and_realised_budgets_agree(tiny_family, questions, stage, nominal):
    routing = RoutingConfig(num_groups=16, kept_groups=4)
    backbone = compress(tiny_family, routing, name="fastv", keep_ratio=0.25, stage=stage).eval()
    answers = answer_all(backbone, InstructionRecords(questions), max_new_tokens=1)
    facts = arm_facts("arm", backbone, answers)
    assert facts.nominal == pytest.approx(nominal)
    assert facts.realised == pytest.approx(nominal)
    assert (facts.tokens, facts.groups) == ("16/64", "S16K4 linear")
    assert answers.kv_bytes == pytest.approx(answers.ledger.bytes_of(), rel=0.02)  # the index differs by paddings
    assert facts.bytes_share == answers.kv_bytes / answers.ledger.dense_bytes()


def test_evictions_and_precision_are_in_the_facts(tiny_family, questions):
    compression = Compression(FirstVisual(), 0.25, kv_dtype="int8")
    answers = answer_all(compress(tiny_family).eval(), InstructionRecords(questions), 2048, 8, 3, 12, None, compression)
    facts = arm_facts("arm", compress(tiny_family), answers)
    assert (facts.nominal, facts.realised, facts.eviction) == (1, 0.25, "first_visual 0.25 int8")
    assert answers.kv_bytes < 0.3 * answers.ledger.bytes_of()


def test_evaluate_prints_a_table_and_writes_records(vlm_adapter, questions, tmp_path, capsys):
    out = tmp_path / "out.json"
    argv = ["evaluate", "--adapter", str(vlm_adapter), "--data", str(questions), "--max-new-tokens", "2"]
    assert main([*argv, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for words in ("16/64", "S4K1 linear", "15.625%", "exists_color", "KV bytes"):
        assert words in printed
    record = json.loads(out.read_text())["runs"][0]
    assert record["eviction"] == "-"
    assert 0 < record["kv_bytes"] < 0.5 * record["dense_kv_bytes"]
    assert len(record["predictions"]) == len(record["scores"]) == 24
    assert main([*argv, "--out", str(out)]) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--adapter", "nowhere"], "not an adapter folder"),
        (["--data", "nowhere.json"], "does not exist"),
        (["--batch-size", "0"], "at least 1"),
        (["--limt", "3"], "--limit"),
    ],
)
def test_mistakes_are_one_line(vlm_adapter, questions, capsys, change, words):
    argv = [
        "evaluate",
        "--data",
        str(questions),
        *([] if change[0] == "--adapter" else ["--adapter", str(vlm_adapter)]),
    ]
    assert main([*argv, *change]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in error
    assert error.startswith("subtoken-train: error:")


def test_missing_image_is_named(vlm_adapter, questions, capsys):
    first = json.loads(questions.read_text())[0]
    (questions.parent / first["image"]).unlink()
    assert main(["evaluate", "--adapter", str(vlm_adapter), "--data", str(questions)]) == 2
    assert first["image"] in capsys.readouterr().err


def test_evaluate_compresses_and_takes_a_backbone_alone(vlm_adapter, questions, tmp_path, capsys, dummy_evictions):
    backbone = vlm_adapter.parent / "backbone"
    argv = ["evaluate", "--data", str(questions), "--max-new-tokens", "2", "--limit", "6", "--eviction", "first_visual"]
    argv += ["--eviction-keep", "8tokens", "--eviction-option", "window=2", "--scope", "visual", "--kv-dtype", "int8"]
    out = tmp_path / "out.json"
    alone = ["--backbone", str(backbone), "--reducer", "fastv", "--keep-ratio", "0.5", "--out", str(out)]
    assert main([*argv, *alone]) == 0
    printed = capsys.readouterr().out
    for words in ("32/64", "first_visual 8 tokens int8", f"backbone: {backbone}"):
        assert words in printed
    record = json.loads(out.read_text())["runs"][0]
    assert (record["arm"], record["eviction"]) == ("backbone", "first_visual 8 tokens int8")
    assert record["realised_kv"] == 8 / 64
    assert main([*argv, "--adapter", str(vlm_adapter), "--backbone", str(backbone)]) == 0
    assert "S4K1 linear" in capsys.readouterr().out
    assert main(["evaluate", "--data", str(questions)]) == 2
    assert "give --adapter DIR, or --backbone PATH" in capsys.readouterr().err
