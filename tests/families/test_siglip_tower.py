"""Patches of a SigLIP tower, and the attention that they receive: transformers' own eager attention."""

import pytest
import torch

from subtoken_train.families.towers import features_with_statistics, patch_features
from tests.support.helpers import eager_calls
from tests.support.tiny.llava_onevision import SIDE, onevision_family


@pytest.fixture
def tower():
    return onevision_family().model.model.vision_tower


def pixels(tiles, seed=0):
    return torch.randn(tiles, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("layers", "made_by"), [([-1], 2), ([3], 2), ([-2], 1), ([-1, 1], 0)])
@torch.no_grad()
def test_statistics_are_those_of_the_layer_that_made_the_features(tower, monkeypatch, layers, made_by):
    tiles = pixels(3)
    features, received, keys = features_with_statistics(tower, tiles, layers)
    states = tower(tiles, output_hidden_states=True).hidden_states
    assert torch.equal(features, torch.cat([states[layer] for layer in layers], -1))
    attention = tower.encoder.layers[made_by].self_attn
    ((weights, key),) = eager_calls(tower, attention, lambda: tower(tiles), monkeypatch)
    torch.testing.assert_close(received, weights.mean(1).sum(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(keys, key.mean(1), rtol=1e-4, atol=1e-5)
    assert received.dtype == keys.dtype == torch.float32


@torch.no_grad()
def test_a_tile_does_not_depend_on_the_others(tower):
    tiles = pixels(4)
    together = features_with_statistics(tower, tiles, [-1])
    for tile in range(4):
        alone = features_with_statistics(tower, tiles[tile : tile + 1], [-1])
        for mine, all_of_them in zip(alone, together, strict=True):
            torch.testing.assert_close(mine[0], all_of_them[tile], rtol=1e-4, atol=1e-5)
    assert together[1].sum(-1).tolist() == pytest.approx([9] * 4, rel=1e-5)


@torch.no_grad()
def test_bf16_towers_give_statistics_in_fp32(tower):
    features, received, keys = features_with_statistics(tower.bfloat16(), pixels(2).bfloat16(), [-1])
    assert (features.dtype, received.dtype, keys.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_only_the_chosen_states_are_held(tower):
    states = tower(pixels(1), output_hidden_states=[-1]).hidden_states
    assert [state is None for state in states] == [True, True, True, False]
    assert patch_features(tower, pixels(2), [-1]).shape == (2, 9, 32)


def test_embeddings_have_no_attention(tower):
    with pytest.raises(ValueError, match="past the embeddings; this backbone has 0 of a tower of 3 layers"):
        features_with_statistics(tower, pixels(1), [0])
