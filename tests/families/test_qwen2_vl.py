"""Qwen2-VL: its tower sees whole frames; VisionZip's statistics of it, Qwen3-VL and GLM-4V are eager attention's."""

from functools import partial

import pytest
import torch
from PIL import Image

from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from tests.support.tiny.glm4v import glm_family
from tests.support.tiny.qwen import qwen2_family, qwen3_family, qwen_video

PICTURES = [Image.effect_noise((100, 70), 60).convert("RGB"), qwen_video(4)]


@torch.no_grad()
@pytest.mark.parametrize("build", [qwen2_family, qwen3_family, glm_family, partial(glm_family, experts=True)])
def test_statistics_are_those_of_eager_attention(build, monkeypatch):
    """Frame by frame: the second picture has two layers."""
    family = build()
    inputs = inputs_of(family, "<image> and <video> ?", PICTURES)
    batch = batch_from_inputs(family, inputs["input_ids"], inputs["attention_mask"].bool(), inputs, None)
    states, plain = family.visual_states(batch, "received"), family.visual_states(batch)
    tower, matrices = family.model.model.visual, []
    module = __import__(type(tower).__module__, fromlist=["x"])
    eager = module.eager_attention_forward

    def recording(attention, *args, **options):
        output, weights = eager(attention, *args, **options)
        if attention is tower.blocks[-1].attn:
            matrices.append(weights[0])
        return output, weights

    monkeypatch.setattr(module, "eager_attention_forward", recording)
    tower.set_attn_implementation("eager")
    family.visual_states(batch)
    layers, high, wide = batch.image_grid_I3[1].tolist()
    assert [len(matrix[0]) for matrix in matrices[1:]] == [high * wide] * layers == [high * wide] * 2
    expected = torch.cat([matrix.mean(0).sum(0) for matrix in matrices]).view(-1, 4).mean(1)
    torch.testing.assert_close(torch.cat(states.received), expected, rtol=1e-4, atol=1e-5)
    assert [len(tokens) for tokens in states.tokens] == [len(keys) for keys in states.keys]
    assert all(torch.equal(a, b) for a, b in zip(states.tokens, plain.tokens, strict=True))
