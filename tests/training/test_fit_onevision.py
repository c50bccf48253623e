"""A short fit of a random tiny LLaVA-OneVision: every adapter moves, nothing else does, the folder reads back."""

from __future__ import annotations

import pytest

from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from tests.support.helpers import moved_by_fit, save_backbone
from tests.support.onevision_tiny import onevision_family

KINDS = {
    "fastv-decoder-linear": ["--model.reducer.stage=decoder"],
    "visionzip-mlp-checkpointing-bf16": [
        "--model.reducer.name=visionzip",
        "--model.routing.selector=mlp",
        "--model.gradient_checkpointing=true",
        "--trainer.precision=bf16-mixed",
    ],
}


@pytest.fixture
def onevision_run(tiny_run, tmp_path):
    """As ``tiny_run``: three steps on the same scenes, whose images are nine tiles, scaled down to four, here."""
    folder = save_backbone(onevision_family(), tmp_path / "onevision")

    def argv(*extra: str) -> list[str]:
        settings = ["--data.max_length=512", "--model.reducer.keep_ratio=0.5", "--trainer.max_steps=3"]
        return tiny_run(f"--model.backbone.path={folder}", *settings, "--model.optimizer.warmup_steps=0", *extra)

    return argv


@pytest.mark.parametrize("extra", KINDS.values(), ids=KINDS)
def test_three_steps_move_exactly_the_trainables(onevision_run, extra):
    cli = RecipeCLI(onevision_run(*extra)[1:])
    moved = moved_by_fit(cli)
    assert {f"compressed.{name}" for name in moved} == set(cli.model.trained())
    assert len([name for name in moved if "lora_" in name]) == 4 * 2 * 2


def test_the_adapter_folder_reads_back(onevision_run, tmp_path):
    assert main(onevision_run("--model.reducer.name=visionzip")) == 0
    config, backbone, _ = read_adapter(tmp_path / "run" / "adapter")
    assert config.identity.model_type == "llava_onevision"
    assert all(p.abs().sum() > 0 for name, p in backbone.named_parameters() if "lora_B" in name)


def test_a_cap_of_pixels_is_refused_in_words(onevision_run, capsys):
    assert main(onevision_run("--model.backbone.max_pixels=5000")) == 2
    assert "max_pixels=5000: llava_onevision cuts images into tiles" in capsys.readouterr().err
