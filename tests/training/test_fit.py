"""The fit command, end to end on a random tiny LLaVA: what trains, what stays, what is written, what resumes."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from subtoken_train.cli.main import main
from tests.support.commands import refused
from tests.support.helpers import interrupted_fit, last_state
from tests.support.run_folders import adapter_tensors, content, same_tensors
from tests.support.sampling import sampled


def weights(run: Path) -> dict[str, torch.Tensor]:
    return adapter_tensors(run / "adapter")


def test_fit_trains_adapters_only_and_logs(tiny_run, tmp_path):
    backbone_file = tmp_path / "backbone" / "model.safetensors"
    before = backbone_file.read_bytes()
    assert main(tiny_run()) == 0
    run = tmp_path / "run"
    trained = weights(run)
    # 4 layers x q/v x (A + B), 4 x router (weight + bias)
    assert len(trained) == 4 * 2 * 2 + 4 * 2
    assert all(tensor.abs().sum() > 0 for name, tensor in trained.items() if "lora_B" in name)
    assert backbone_file.read_bytes() == before
    with (run / "logs" / "csv" / "metrics.csv").open() as file:
        columns = next(csv.reader(file))
    for wanted in ("train/loss", "train/balance", "train/kept_visual_fraction", "tokens_per_s/after"):
        assert wanted in columns
    assert "group_usage_entropy/layer_3" in columns
    assert list((run / "logs" / "tb").glob("events.*"))


@sampled(
    "extra",
    [
        ["--model.routing=null"],
        ["--model.routing.selector=mlp", "--model.gradient_checkpointing=true"],
        ["--model.routing.selector=value_norm"],
        ["--model.routing.budget=global", "--model.routing.query_conditioned=true"],
        ["--model.reducer.stage=decoder", "--trainer.precision=bf16-mixed"],
        ["--model.reducer.name=random", "--model.routing.layout=per_head", "--trainer.accumulate_grad_batches=2"],
    ],
    every=3,
    ids=["anchor", "mlp-checkpointing", "value_norm", "global-query", "decoder-bf16", "random-per_head-accumulate"],
)
def test_every_arm_trains(tiny_run, tmp_path, extra):
    assert main(tiny_run("--trainer.max_steps=2", *extra)) == 0
    trained = weights(tmp_path / "run")
    assert all(tensor.abs().sum() > 0 for name, tensor in trained.items() if "lora_B" in name)


@pytest.mark.slow
def test_accumulation_equals_one_large_batch(tiny_run, tmp_path):
    plain = ["--trainer.max_steps=3", "--model.lora.dropout=0.0", "--data.group_by_length=false"]
    assert main(tiny_run(*plain, "--data.batch_size=8", output="large")) == 0
    small = ["--data.batch_size=4", "--trainer.accumulate_grad_batches=2"]
    assert main(tiny_run(*plain, *small, output="small")) == 0
    large, accumulated = weights(tmp_path / "large"), weights(tmp_path / "small")
    for name, tensor in large.items():
        assert torch.allclose(tensor, accumulated[name], atol=2e-5), name


def test_resume_gives_the_weights_of_never_having_stopped(tiny_run, tmp_path):
    dropout = "--model.lora.dropout=0.1"
    assert main(tiny_run(dropout, output="whole")) == 0
    # the schedule must be the same, so the first part stops by signal, not by max_steps
    assert interrupted_fit(tiny_run(dropout, output="parts"), after_step=2) == 130
    assert main(tiny_run(dropout, "--resume", output="parts")) == 0
    assert same_tensors(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    logs = tmp_path / "parts" / "logs"
    assert (logs / "csv" / "metrics.csv").exists()
    assert (logs / "csv-2" / "metrics.csv").exists()


@pytest.fixture
def finished(tiny_run, tmp_path):
    """A run of one step, and what lies in it."""
    assert main(tiny_run("--trainer.max_steps=1")) == 0
    return tmp_path / "run"


@pytest.mark.slow
def test_resume_with_another_recipe_is_refused(tiny_run, finished, capsys):
    before = content(finished)
    other = tiny_run("--trainer.max_steps=1", "--resume", "--model.routing.selector=mlp")
    assert "the run began with another recipe (model.routing.selector: linear, here mlp)" in refused(capsys, *other)
    (finished / "recipe.yaml").rename(finished / "moved.yaml")
    assert "trained tensors differ, first compressed.bank" in refused(capsys, *other)
    (finished / "moved.yaml").rename(finished / "recipe.yaml")
    assert content(finished) == before


@pytest.mark.slow
def test_resume_from_a_newer_layout_or_half_a_checkpoint_is_refused(tiny_run, finished, capsys):
    marker = finished / "checkpoints" / "step-1" / "COMPLETE"
    marker.write_text(marker.read_text().replace('"schema_version": 1', '"schema_version": 2'))
    before = content(finished)
    assert "written in layout 2" in refused(capsys, *tiny_run("--resume"))
    assert content(finished) == before
    marker.unlink()
    assert main(tiny_run("--resume")) == 2
    assert "nothing to resume: no complete checkpoint in" in (said := capsys.readouterr().err)
    assert "step-1 is not complete" in said


@pytest.mark.slow
def test_a_longer_run_says_what_differs(tiny_run, finished, capsys):
    assert main(tiny_run("--resume", "--trainer.max_steps=2", "--data.num_workers=1")) == 0
    said = capsys.readouterr().err
    assert f"resuming from {finished / 'checkpoints' / 'step-1'}" in said
    assert "schedule: trainer.max_steps: 1, here 2" in said
    assert last_state(finished)["global_step"] == 2
