"""The programs' shared run: stopped and resumed, it ends at the same weights."""

import json
from argparse import Namespace

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from checkpoints import pretrain_tiny_llama
from checkpoints.pretraining import attention_fp32, warmed_cosine


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
