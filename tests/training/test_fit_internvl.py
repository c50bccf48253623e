"""A short fit of a random tiny InternVL3: every adapter moves, nothing else does, the folder reads back; its memory."""

from __future__ import annotations

import pytest
from transformers import InternVLConfig, InternVLForConditionalGeneration

from benchmarks import memory_models, training_memory
from tests.support.internvl_tiny import internvl_family
from tests.support.sampling import sampled
from tests.support.seeing_fits import IN_TOWER_BF16, argv_of, assert_moves_exactly_the_trainables, read_back

KINDS = {"fastv-linear": ["--model.reducer.name=fastv"], "visionzip-mlp-checkpointing-bf16": IN_TOWER_BF16}


@sampled("extra", KINDS.values(), every=2, ids=KINDS)
def test_three_steps_move_exactly_the_trainables(tiny_run, tmp_path, extra):
    """Scenes are five tiles of four visual tokens here."""
    assert_moves_exactly_the_trainables(argv_of(tiny_run, tmp_path, internvl_family(), *extra), 3)


@pytest.mark.slow
def test_the_adapter_folder_reads_back_with_its_cap(tiny_run, tmp_path):
    extra = ("--model.backbone.max_pixels=3000", "--model.reducer.name=visionzip")
    config, backbone = read_back(argv_of(tiny_run, tmp_path, internvl_family(), *extra), tmp_path, "internvl")
    assert config.backbone.max_pixels == 3000
    assert backbone.family.most_tiles == 2


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


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_steps_hold_what_was_predicted(monkeypatch, tmp_path, checkpointing):
    monkeypatch.setitem(memory_models.FURTHER, "internvl", larger)
    case = training_memory.Case("internvl", reducer="fastv", checkpointing=checkpointing)
    assert abs(training_memory.measure(case, tmp_path)["error"]) < 0.07
