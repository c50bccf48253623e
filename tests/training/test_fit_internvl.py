"""A short fit of a random tiny InternVL3: every adapter moves, nothing else does, the folder reads back; its memory."""

from __future__ import annotations

import pytest
from transformers import InternVLConfig, InternVLForConditionalGeneration

from benchmarks import memory_models, training_memory
from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from tests.support.helpers import moved_by_fit, save_backbone
from tests.support.internvl_tiny import internvl_family

KINDS = {
    "fastv-linear": ["--model.reducer.name=fastv"],
    "visionzip-mlp-checkpointing-bf16": [
        "--model.reducer.name=visionzip",
        "--model.routing.selector=mlp",
        "--model.gradient_checkpointing=true",
        "--trainer.precision=bf16-mixed",
    ],
}


@pytest.fixture
def internvl_run(tiny_run, tmp_path):
    """As ``tiny_run``: three steps on the same scenes, whose images are five tiles of four visual tokens here."""
    folder = save_backbone(internvl_family(), tmp_path / "internvl")

    def argv(*extra: str) -> list[str]:
        settings = ["--data.max_length=512", "--model.reducer.keep_ratio=0.5", "--trainer.max_steps=3"]
        return tiny_run(f"--model.backbone.path={folder}", *settings, "--model.optimizer.warmup_steps=0", *extra)

    return argv


@pytest.mark.parametrize("extra", KINDS.values(), ids=KINDS)
def test_three_steps_move_exactly_the_trainables(internvl_run, extra):
    cli = RecipeCLI(internvl_run(*extra)[1:])
    moved = moved_by_fit(cli)
    assert {f"compressed.{name}" for name in moved} == set(cli.model.trained())
    assert len([name for name in moved if "lora_" in name]) == 3 * 2 * 2


def test_the_adapter_folder_reads_back_with_its_cap(internvl_run, tmp_path):
    assert main(internvl_run("--model.backbone.max_pixels=3000", "--model.reducer.name=visionzip")) == 0
    config, backbone, _ = read_adapter(tmp_path / "run" / "adapter")
    assert config.identity.model_type == "internvl"
    assert config.backbone.max_pixels == 3000
    assert backbone.family.most_tiles == 2
    assert all(p.abs().sum() > 0 for name, p in backbone.named_parameters() if "lora_B" in name)


def larger() -> InternVLForConditionalGeneration:
    """Large enough that tensors outweigh what a prediction leaves out; tiles of 84 pixels."""
    text = {**memory_models._TEXT, "model_type": "qwen2", "tie_word_embeddings": False}
    vision = {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "attention_bias": True,
        "image_size": 84,
        "patch_size": 14,
    }
    config = InternVLConfig(text_config=text, vision_config=vision, image_token_id=4, tie_word_embeddings=False)
    return InternVLForConditionalGeneration(config)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_hold_what_was_predicted(monkeypatch, tmp_path, checkpointing):
    monkeypatch.setitem(memory_models.FURTHER, "internvl", larger)
    case = training_memory.Case("internvl", reducer="fastv", checkpointing=checkpointing)
    assert abs(training_memory.measure(case, tmp_path)["error"]) < 0.07
