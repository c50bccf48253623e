"""Rotations: those of transformers, undone, and their mean."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subtoken_train.functional.rotary import Rotation


def rotation(stretch=1.0):
    angle = torch.rand(2, 5, 4).repeat(1, 1, 2) * 6
    return Rotation(angle.cos() * stretch, angle.sin() * stretch)


@pytest.mark.parametrize("stretch", [1.0, 1.3])
def test_turns_as_transformers_and_back(stretch):
    turning, vectors = rotation(stretch), torch.randn(2, 3, 5, 8)
    expected, _ = apply_rotary_pos_emb(vectors, vectors, turning.cos_BNr, turning.sin_BNr)
    assert torch.equal(turning.turn(vectors), expected)
    assert torch.allclose(turning.turn_back(expected), vectors, atol=1e-6)


def test_the_mean_turns_as_the_mean_of_all():
    turning, vectors = rotation(), torch.randn(2, 3, 1, 8)
    each = torch.stack([Rotation(turning.cos_BNr[:, [i]], turning.sin_BNr[:, [i]]).turn(vectors) for i in range(5)])
    assert torch.allclose(turning.mean().turn(vectors), each.mean(0), atol=1e-6)


def test_lower_precision_is_turned_in_fp32():
    turning, vectors = rotation(), torch.randn(2, 3, 5, 8).bfloat16()
    assert torch.equal(turning.turn(vectors), turning.turn(vectors.float()))
