"""The embedded VLM and the embedded language model are what their READMEs say, and everything else holds on them."""

from __future__ import annotations

import json
from argparse import Namespace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from benchmarks.comparison_lists import Questions
from benchmarks.tiny_comparison import answer_recall
from checkpoints import pretrain_tiny_llama
from checkpoints.pretraining import attention_fp32, warmed_cosine
from subtoken_train.artifact.folder import read_adapter
from subtoken_train.datasets.recall import RecallTask
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.scene_files import write_scene_split
from subtoken_train.evaluation.runner.data_file import answer_records, run_of
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from tests.support.helpers import compress
from tests.support.places import ROOT
from tests.support.sampling import sampled

CHECKPOINTS = ROOT / "checkpoints"
QUEST = {"name": "quest", "page_size": 4, "window": 16}


@pytest.fixture(scope="module")
def dev(tmp_path_factory):
    """Held-out scenes (digits of the dev split): 36 of each short kind."""
    folder = tmp_path_factory.mktemp("scenes")
    write_scene_split(folder, "dev", 280, seed=11)
    return InstructionRecords(folder / "dev.json")


@pytest.fixture(scope="module")
def vlm():
    return load_family(BackboneConfig())


@pytest.fixture(scope="module")
def language_model():
    return load_family(BackboneConfig(path="checkpoints/tiny-llama"))


@pytest.fixture(scope="module")
def task(language_model):
    return RecallTask(language_model.tokenizer, 512, 24, 8)


def test_answers_held_out_scenes(vlm, dev):
    by_kind = answer_records(compress(vlm).eval(), dev).by_kind()
    for kind, scores in by_kind.items():
        assert np.mean(scores) >= (0.80 if kind == "count" else 0.88), kind  # of 36 questions: a floor


@sampled("name", ["tiny_fastv25_s16k4", "tiny_fastv25_s16k4_anchor", "tiny_lora_only"], every=3)
def test_shipped_adapters_load(name):
    config, _, _ = read_adapter(CHECKPOINTS / "adapters" / name)
    assert config.training["name"].startswith(name)


@pytest.mark.slow
def test_recall_with_the_whole_context_and_what_quest_costs_it(language_model, task):
    """The floor of the README's figure; untrained for it, a model that sees an eighth of the context loses facts."""
    whole = answer_recall(compress(language_model).eval(), task, Questions("test", 0, 16))
    assert np.mean(whole.scores) >= 0.95
    assert [record.id for record in whole.records] == [f"test-{i:06d}" for i in range(16)]
    quest = compress(language_model, keep_ratio=0.125, **QUEST).eval()
    answers = answer_recall(quest, task, Questions("test", 0, 16))
    assert np.mean(answers.scores) <= 0.8
    run = run_of("quest", quest, answers, b"", 512)
    assert run["visual_tokens"] == "64/512"
    assert run["nominal_kv"] == run["realised_kv"] == 0.125


@pytest.fixture
def tiny_run(monkeypatch):
    """A short pre-training of the tiny Llama in a folder: two small phases, two dev samples."""
    AttentionInterface.register("fp32", attention_fp32)
    AttentionMaskInterface.register("fp32", sdpa_mask)
    phases = [pretrain_tiny_llama.Phase(32, (1, 2), 2, 2), pretrain_tiny_llama.Phase(64, (2, 3), 3, 1)]
    monkeypatch.setattr(pretrain_tiny_llama, "CURRICULUM", phases)
    monkeypatch.setattr(pretrain_tiny_llama, "MASTERED", -1.0)
    monkeypatch.setattr(pretrain_tiny_llama, "DEV_TASKS", {64: (3, 2)})

    def start(folder, save_every=10):
        folder.mkdir(exist_ok=True)
        return pretrain_tiny_llama.Run(
            Namespace(seed=0, work=folder, steps=4, batch_size=2, learning_rate=1e-3, save_every=save_every)
        )

    return start


@pytest.mark.slow
def test_a_resumed_run_ends_at_the_same_weights(tiny_run, tmp_path, monkeypatch):
    whole, stopped = tiny_run(tmp_path / "whole"), tiny_run(tmp_path / "parts", save_every=3)
    whole.train()
    step = stopped.train_step
    monkeypatch.setattr(stopped, "train_step", lambda: step() if stopped.step < 3 else pytest.fail("stopped"))
    with pytest.raises(pytest.fail.Exception):
        stopped.train()
    resumed = tiny_run(tmp_path / "parts")
    assert resumed.step == 3
    assert resumed.progress == stopped.progress
    assert resumed.progress["stage"] == 1
    resumed.train()
    states = [run.model.state_dict() for run in (whole, resumed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    log = [json.loads(line) for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in log] == [3, 4]
    assert log[-1]["dev"].keys() == {"64"}


def test_schedule():
    shares = [warmed_cosine(step, 100, 1100, warmup=10) for step in (100, 104, 109, 600, 1100)]
    assert shares == pytest.approx([0.102, 0.51, 1.02, 0.52, 0.02], abs=2e-3)
