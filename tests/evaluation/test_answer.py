"""Answering a data file: order, ledger, batch independence, and the evaluate command."""

from __future__ import annotations

import json

import pytest

from subtoken_train.artifact.folder import AdapterConfig, write_adapter
from subtoken_train.artifact.identity import identify
from subtoken_train.backbones.build import build
from subtoken_train.backbones.load import BackboneConfig
from subtoken_train.backbones.lora import LoraSettings
from subtoken_train.cli.main import main
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scene_files import write_scenes
from subtoken_train.evaluation.answer import answer_all
from subtoken_train.evaluation.report import arm_facts
from subtoken_train.reducers import ReducerConfig
from subtoken_train.routing import RoutingConfig

from helpers import compress, save_backbone


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
    assert (facts.visual_tokens, facts.groups) == ("16/64", "S16K4 linear")


@pytest.fixture
def adapter(tmp_path, tiny_family):
    source = BackboneConfig(path=str(save_backbone(tiny_family, tmp_path / "backbone")))
    lora, reducer = LoraSettings(rank=2), ReducerConfig(name="fastv", keep_ratio=0.25)
    routing = RoutingConfig(num_groups=4, kept_groups=1)
    backbone, peft_model = build(source, lora, reducer, routing)
    config = AdapterConfig(source, lora, reducer, routing, identify(backbone.family, source), {"name": "tiny"})
    return write_adapter(tmp_path / "adapter", config, backbone, peft_model)


def test_evaluate_prints_a_table_and_writes_records(adapter, questions, tmp_path, capsys):
    out = tmp_path / "out.json"
    argv = ["evaluate", "--adapter", str(adapter), "--data", str(questions), "--max-new-tokens", "2"]
    assert main([*argv, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for words in ("16/64", "S4K1 linear", "15.625%", "exists_color", "zeros"):
        assert words in printed
    record = json.loads(out.read_text())["runs"][0]
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
def test_mistakes_are_one_line(adapter, questions, capsys, change, words):
    argv = ["evaluate", "--data", str(questions), *([] if change[0] == "--adapter" else ["--adapter", str(adapter)])]
    assert main([*argv, *change]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert words in error
    assert error.startswith("subtoken-train: error:")


def test_missing_image_is_named(adapter, questions, capsys):
    first = json.loads(questions.read_text())[0]
    (questions.parent / first["image"]).unlink()
    assert main(["evaluate", "--adapter", str(adapter), "--data", str(questions)]) == 2
    assert first["image"] in capsys.readouterr().err
