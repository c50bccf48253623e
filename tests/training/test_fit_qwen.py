"""A short fit of random tiny Qwen-VLs: every adapter moves, nothing else does, the folder reads back."""

from __future__ import annotations

import pytest

from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from tests.support.helpers import moved_by_fit, save_backbone
from tests.support.qwen_tiny import qwen2_family, qwen3_family, qwen_family

KINDS = {
    "fastv-linear": ["--model.reducer.name=fastv"],
    "fastv-decoder-mlp": ["--model.reducer.stage=decoder", "--model.routing.selector=mlp"],
    "visionzip-linear": ["--model.reducer.name=visionzip"],
    "visionzip-mlp-checkpointing-bf16": [
        "--model.reducer.name=visionzip",
        "--model.routing.selector=mlp",
        "--model.gradient_checkpointing=true",
        "--trainer.precision=bf16-mixed",
    ],
}


@pytest.fixture
def qwen_run(tiny_run, tmp_path):
    """As ``tiny_run``: three steps on the same scenes, whose images are 3 x 3 visual tokens here."""
    folder = save_backbone(qwen_family(), tmp_path / "qwen")

    def argv(*extra: str) -> list[str]:
        settings = ["--data.max_length=512", "--model.reducer.keep_ratio=0.5", "--trainer.max_steps=3"]
        return tiny_run(f"--model.backbone.path={folder}", *settings, "--model.optimizer.warmup_steps=0", *extra)

    return argv


@pytest.mark.parametrize("make", [qwen2_family, qwen3_family])
def test_other_qwens_fit_and_read_back(make, qwen_run, tmp_path):
    """The last of several paths counts; the run's adapter is exactly what trained."""
    folder = save_backbone(make(), tmp_path / "other")
    argv = qwen_run(f"--model.backbone.path={folder}", "--model.reducer.name=visionzip")
    cli = RecipeCLI(argv[1:])
    moved = moved_by_fit(cli)
    assert {f"compressed.{name}" for name in moved} == set(cli.model.trained())
    assert len([name for name in moved if "lora_" in name]) == 4 * 2 * 2
    assert main([*argv, f"--output_dir={tmp_path / 'run2'}"]) == 0
    config, backbone, _ = read_adapter(tmp_path / "run2" / "adapter")
    assert config.identity.model_type == backbone.family.model.config.model_type
    assert all(p.abs().sum() > 0 for name, p in backbone.named_parameters() if "lora_B" in name)


@pytest.mark.parametrize("extra", KINDS.values(), ids=KINDS)
def test_three_steps_move_exactly_the_trainables(qwen_run, extra):
    cli = RecipeCLI(qwen_run(*extra)[1:])
    moved = moved_by_fit(cli)
    assert {f"compressed.{name}" for name in moved} == set(cli.model.trained())
    assert len([name for name in moved if "lora_" in name]) == 4 * 2 * 2


def test_the_adapter_folder_reads_back_with_its_cap(qwen_run, tmp_path):
    assert main(qwen_run("--model.backbone.max_pixels=5000", "--model.reducer.name=visionzip")) == 0
    config, backbone, _ = read_adapter(tmp_path / "run" / "adapter")
    assert config.backbone.max_pixels == backbone.family.max_pixels == 5000
    assert config.identity.model_type == "qwen2_5_vl"
    assert all(p.abs().sum() > 0 for name, p in backbone.named_parameters() if "lora_B" in name)
