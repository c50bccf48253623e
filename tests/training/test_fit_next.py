"""A short fit of a random tiny LLaVA-NeXT: every adapter moves, nothing else does, the folder reads back."""

from __future__ import annotations

import pytest

from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from tests.support.helpers import moved_by_fit, save_backbone
from tests.support.next_tiny import next_family
from tests.support.sampling import sampled

KINDS = {
    "llama-fastv-linear": ("llama", ["--model.reducer.name=fastv"]),
    "mistral-visionzip-mlp-checkpointing-bf16": (
        "mistral",
        [
            "--model.reducer.name=visionzip",
            "--model.routing.selector=mlp",
            "--model.gradient_checkpointing=true",
            "--trainer.precision=bf16-mixed",
        ],
    ),
}


@pytest.fixture
def next_run(tiny_run, tmp_path):
    """As ``tiny_run``: three steps on the same scenes, whose images are five tiles of 3 x 3 patches here."""

    def argv(kind: str, *extra: str) -> list[str]:
        folder = save_backbone(next_family(kind), tmp_path / "next")
        settings = ["--data.max_length=512", "--model.reducer.keep_ratio=0.5", "--trainer.max_steps=3"]
        return tiny_run(f"--model.backbone.path={folder}", *settings, "--model.optimizer.warmup_steps=0", *extra)

    return argv


@sampled(("kind", "extra"), KINDS.values(), every=2, ids=KINDS)
def test_three_steps_move_exactly_the_trainables(next_run, kind, extra):
    cli = RecipeCLI(next_run(kind, *extra)[1:])
    moved = moved_by_fit(cli)
    assert {f"compressed.{name}" for name in moved} == set(cli.model.trained())
    assert len([name for name in moved if "lora_" in name]) == 3 * 2 * 2


@pytest.mark.slow
def test_the_adapter_folder_reads_back(next_run, tmp_path):
    assert main(next_run("mistral", "--model.reducer.name=visionzip")) == 0
    config, backbone, _ = read_adapter(tmp_path / "run" / "adapter")
    assert config.identity.model_type == "llava_next"
    assert backbone.family.chat.template == "mistral_instruct"
    assert all(p.abs().sum() > 0 for name, p in backbone.named_parameters() if "lora_B" in name)
