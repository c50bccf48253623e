"""Prompts for timing: their parts add up, pictures are where they belong, and no processor is needed where none is."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.benchmarking.synthetic_prompts import (
    Shrink,
    check_positions,
    draw_prompts,
    prompt_parts,
    random_family,
)
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.types import Region
from tests.support.sampling import sampled
from tests.support.text_families import text_family
from tests.support.tiny.qwen import qwen_family

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [2, 3, 100, 128, 129])
def test_a_text_has_a_context_and_a_question(length):
    family = text_family("llama")
    parts = prompt_parts(family, length)
    assert (parts.length, parts.query) == (length, min(64, length // 2))
    prompts = draw_prompts(family, parts, 3)
    assert prompts.input_ids_BN.shape == (3, length)
    assert (prompts.regions_BN == Region.CONTEXT).sum(-1).tolist() == [parts.context] * 3
    assert not torch.equal(prompts.input_ids_BN[0], prompts.input_ids_BN[1])


@pytest.mark.parametrize(("length", "images"), [(83, 1), (147, 1), (148, 2), (213, 3)])
def test_as_many_whole_images_as_fit(tiny_family, length, images):
    parts = prompt_parts(tiny_family, length)
    assert (parts.length, parts.images) == (length, images)
    prompts = draw_prompts(tiny_family, parts, 2)
    assert (prompts.regions_BN == Region.VISUAL).sum(-1).tolist() == [64 * images] * 2
    assert (prompts.regions_BN == Region.SYSTEM).sum(-1).tolist() == [5] * 2
    assert prompts.images_per_sample_B.tolist() == [images] * 2
    assert not (prompts.regions_BN == Region.PADDING).any()
    if images > 1:  # a word between two of them
        assert prompts.regions_BN[0, 5 + 64] == Region.QUERY


def test_one_image_and_the_papers_text_unless_told(tiny_family):
    assert prompt_parts(tiny_family).length == 5 + 64 + 14
    assert prompt_parts(text_family("llama")).length == text_family("llama").decoder.config.max_position_embeddings // 2


def test_too_short_or_too_long_is_said(tiny_family):
    with pytest.raises(ValueError, match=r"--lengths 82: .* takes 83 tokens"):
        prompt_parts(tiny_family, 82)
    with pytest.raises(ValueError, match="give at least 2"):
        prompt_parts(text_family("llama"), 1)
    family = text_family("llama")
    limit = family.decoder.config.max_position_embeddings
    check_positions(family, prompt_parts(family, limit - 8), 8)
    with pytest.raises(ValueError, match=f"need {limit + 1} positions and the model has {limit}"):
        check_positions(family, prompt_parts(family, limit - 7), 8)


def test_qwens_pictures_without_a_processor_are_those_with_one():
    family = qwen_family()
    parts = prompt_parts(family)
    drawn = draw_prompts(family, parts, 2)
    family.processor, processor = None, family.processor
    bare = draw_prompts(family, parts, 2)
    assert processor is not None
    assert torch.equal(bare.image_grid_I3, drawn.image_grid_I3)
    assert bare.pixel_values.shape == drawn.pixel_values.shape
    assert torch.equal(bare.regions_BN, drawn.regions_BN)


@sampled(
    ("path", "tokens", "width"),
    [("llava-hf/llava-1.5-7b-hf", 576, 128), ("Qwen/Qwen2.5-VL-3B-Instruct", 144, 128)],
    every=2,
)
def test_a_published_architecture_is_drawn_smaller_without_network(path, tokens, width):
    shrink = Shrink(layers=2, narrower=32 if "llava" in path else 16)
    family = random_family(BackboneConfig(path=path), shrink, CPU)
    assert (family.shape.num_layers, family.hidden_size, family.shape.head_dim) == (2, width, 128)
    assert family.processor is None
    prompts = draw_prompts(family, prompt_parts(family), 1)
    assert (prompts.regions_BN == Region.VISUAL).sum() == tokens
    assert all(parameter.isfinite().all() for parameter in family.model.parameters())


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="the model has 32; give at most as many"):
        random_family(BackboneConfig(path="meta-llama/Llama-2-7b-hf"), Shrink(layers=33), CPU)
    with pytest.raises(ValueError, match="quantization 'nf4' is asked for"):
        random_family(BackboneConfig(quantization="nf4"), Shrink(), CPU)
