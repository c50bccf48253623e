"""Grids of other papers, two samples each on random weights of the real classes: they run, and rows say how."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.evaluation.reporting.exports import report_csv
from subtoken_train.evaluation.reporting.report import make_report
from subtoken_train.evaluation.reporting.runs import read_results
from subtoken_train.evaluation.results import read_samples
from subtoken_train.evaluation.runner.run import run_grid
from subtoken_train.evaluation.runner.spec import TaskSpec, read_grid
from tests.support.helpers import save_backbone
from tests.support.places import RECIPES
from tests.support.text_families import text_family
from tests.support.tiny.llava_next import next_family
from tests.support.tiny.llava_onevision import onevision_family
from tests.support.vqa_cases import write_rows

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*is unknown to the tokenizer")]

SEEING = {"vlcache_table2": next_family, "aircache_table4": onevision_family, "tgvkv_main": next_family}
TEXT = {"kvcompose_table2_3_agnostic": "no", "kvcompose_table2_3_aware": "yes", "kvcompose_table4": "no"}
"""Grid -> whether the question is compressed."""


def small(name, backbone, source, out, task):
    """The grid's arms at one budget, on the tiny model and one task with the grid's options."""
    grid = read_grid(RECIPES / "eval" / f"{name}.yaml", out=out, limit=2, batch_size=2, anchors="none")
    arms = {}
    for arm in grid.arms:
        options = {key: value for key, value in arm.eviction_options.items() if key != "calibration"}
        keep = None if arm.eviction is None else 0.5
        ratio = None if arm.keep_ratio is None else 0.5
        own = replace(
            arm, backbone=str(backbone), dtype=None, eviction_keep=keep, eviction_options=options, keep_ratio=ratio
        )
        arms.setdefault(repr(own), own)
    (spec,) = (each for each in grid.tasks if each.name == task)
    options = {**spec.options, "tasks": ["vt"]} if task == "ruler" else spec.options
    return replace(grid, arms=tuple(arms.values()), tasks=(TaskSpec(task, str(source), options),))


@pytest.fixture
def ruler(tmp_path):
    """Two samples of one of RULER's tasks, as its own programs write them."""
    path = tmp_path / "ruler" / "vt" / "validation.jsonl"
    path.parent.mkdir(parents=True)
    text = "VAR A = 12 \n" * 30 + "Question: Find all variables that are assigned the value 12. Answer: they are: "
    rows = [{"index": i, "input": f"{i} {text}", "outputs": ["A"]} for i in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path.parents[1]


@pytest.mark.parametrize("name", TEXT)
def test_kvcomposes_grids_run(name, tmp_path, ruler):
    tokenizer = build_tokenizer()
    family = text_family("llama", vocab_size=len(tokenizer), max_position_embeddings=2048)
    tokenizer.chat_template = CHAT
    family.processor = tokenizer
    grid = small(name, save_backbone(family, tmp_path / "backbone"), ruler, tmp_path / "out", "ruler")
    run_grid(grid, say=lambda line: None)
    arms = read_results([tmp_path / "out"])
    assert len(arms) == len(grid.arms)
    rows = [
        row
        for row in csv.DictReader(io.StringIO(report_csv(make_report([tmp_path / "out"]))))
        if row["eviction"] != "-"
    ]
    assert rows
    assert {row["query_aware"] for row in rows} == {TEXT[name]}
    evicted = [arm for arm in arms if arm.facts.eviction != "-"]
    word = "compressed" if TEXT[name] == "yes" else "kept"
    for arm in evicted:
        (run,) = arm.runs["ruler"].values()
        assert (run.asked, run.question_compressed) == (f"in the chat template; question {word}", word == "compressed")
    for record in read_samples(tmp_path / "out" / evicted[0].name / "ruler").values():
        assert 0 < record.entries_after < record.entries_before


@pytest.mark.parametrize("name", SEEING)
def test_grids_about_pictures_run(name, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    task = "chartqa" if name == "aircache_table4" else "docvqa"
    row = {"question": "What?", "type": "human_test", "answer": "7", "answers": ["7"], "question_types": ["form"]}
    path = {"chartqa": "data/test-00000-of-00001", "docvqa": "DocVQA/validation-00000-of-00001"}[task]
    source = write_rows(tmp_path / "data", path, [{**row, "questionId": str(i)} for i in range(2)])
    grid = small(name, save_backbone(SEEING[name](), tmp_path / "backbone"), source, tmp_path / "out", task)
    run_grid(grid, say=lambda line: None)
    for arm in read_results([tmp_path / "out"]):
        (run,) = arm.runs[task].values()
        assert (len(run.samples), run.asked) == (2, "in the family's chat format; question kept")
        if arm.compressed:
            assert run.cost.total["entries_after"] < run.cost.total["entries_before"]
