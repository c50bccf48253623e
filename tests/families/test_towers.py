"""Attention received and keys of Qwen's and SigLIP's towers: the release's golden, plain loops, eager attention."""

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers.vision_utils import get_vision_window_index

from subtoken_train.families.qwen_vl import per_token, tower_with_statistics
from subtoken_train.families.towers import features_with_statistics, received_attention
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from tests.support.golden_cases import near
from tests.support.helpers import eager_calls, random_scores
from tests.support.refusals import refuses
from tests.support.shards import LargestTensor
from tests.support.tiny import tiny_families
from tests.support.tiny.llava_onevision import SIDE, onevision_family
from tests.support.tiny.qwen import TOKENS, qwen_batch, qwen_family, qwen_records, qwen_video


def test_golden_of_the_qwen_release(shared):
    golden = load_file(shared / "golden" / "visionzip_qwen25vl_lightcompress" / "set_a.safetensors")
    attention_HPP, window_index = golden["vit_attention_last_block"], golden["window_index"]
    query_PHd = attention_HPP.log().transpose(0, 1)  # the softmax of log(A) against unit keys is A again
    heads, patches, _ = attention_HPP.shape
    received = received_attention(query_PHd, torch.eye(patches)[:, None].expand(-1, heads, -1), [patches], 1.0)
    case = "visionzip_qwen25vl_lightcompress"
    near("visionzip", f"{case}: scores", per_token(received, window_index), golden["score_merged"], rtol=1e-5)
    keys = per_token(golden["vit_key_last_block"].transpose(0, 1), window_index).mean(1)
    near("visionzip", f"{case}: keys", keys, golden["key_merged"][0], rtol=1e-5)


@pytest.mark.parametrize("lengths", [[6], [3, 5], [1, 1, 4]])
def test_received_attention_equals_a_plain_loop(lengths):
    """Over images, each with the matrices of all heads as a whole."""
    query, key = random_scores(0, sum(lengths), 3, 4), random_scores(1, sum(lengths), 3, 4)
    received = received_attention(query, key, lengths, 0.5)
    images = zip(*(each.transpose(0, 1).split(lengths, 1) for each in (query, key)), strict=True)
    torch.testing.assert_close(received, torch.cat([(q @ k.mT * 0.5).softmax(-1).sum(1).mean(0) for q, k in images]))
    assert received.sum().item() == pytest.approx(sum(lengths))


def test_no_matrix_is_larger_than_one_image_by_itself():
    query = random_scores(0, 500, 4, 2)
    with LargestTensor() as largest:
        received_attention(query, query, [200, 300], 1.0)
    assert largest.elements == 300 * 300


@pytest.fixture
def family():
    return qwen_family()


@pytest.fixture
def batch(family, tmp_path):
    return qwen_batch(family, qwen_records(tmp_path))


def eager_last_block(family, batch, monkeypatch):
    """Attention matrices [H, n, n] of every image or layer in the last block."""
    tower = family.model.model.visual
    calls = eager_calls(tower, tower.blocks[-1].attn, lambda: family.visual_states(batch), monkeypatch)
    return [weights[0] for weights, _ in calls]


def test_statistics_are_those_of_eager_attention(family, batch, monkeypatch):
    matrices = eager_last_block(family, batch, monkeypatch)
    assert [matrix.shape for matrix in matrices] == [(2, 4 * tokens, 4 * tokens) for tokens in TOKENS]
    made, received, keys = tower_with_statistics(family.model.model.visual, batch.pixel_values, batch.image_grid_I3)
    window_index, _ = get_vision_window_index(batch.image_grid_I3, 2, window_size=56, patch_size=14)
    assert window_index.tolist() != sorted(window_index.tolist())
    expected = torch.zeros(sum(TOKENS))
    columns = torch.cat([matrix.mean(0).sum(0) for matrix in matrices]).view(-1, 4).mean(1)
    expected[window_index] = columns  # place by place, instead of the inverse permutation
    torch.testing.assert_close(received, expected, rtol=1e-4, atol=1e-5)
    assert received.std() > 0.05
    assert keys.shape == (sum(TOKENS), 16)
    assert torch.equal(made.pooler_output, torch.cat(family.visual_states(batch).tokens))


def test_keys_are_taken_after_the_rotary_embedding(family, batch):
    """Turned by their patches' places: the unrotated keys of a uniform image are all alike, these are not."""
    uniform = torch.ones_like(batch.pixel_values)
    _, _, keys = tower_with_statistics(family.model.model.visual, uniform, batch.image_grid_I3)
    assert keys[:12].std(0).max() > 0.01


def test_a_last_block_with_windows_is_refused(family, batch):
    family.model.model.visual.fullatt_block_indexes = [1]
    refuses(r"last block, 3, attends to the whole image", family.visual_states, batch, "received")
    assert family.visual_states(batch).received is None


PICTURES = [Image.effect_noise((100, 70), 60).convert("RGB"), qwen_video(4)]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v", "glm4v_moe"])
def test_statistics_of_towers_without_windows_are_those_of_eager_attention(name, monkeypatch):
    """Frame by frame: the second picture has two layers."""
    family = tiny_families()[name].build()
    inputs = inputs_of(family, "<image> and <video> ?", PICTURES)
    batch = batch_from_inputs(family, inputs["input_ids"], inputs["attention_mask"].bool(), inputs, None)
    states, plain = family.visual_states(batch, "received"), family.visual_states(batch)
    matrices = eager_last_block(family, batch, monkeypatch)
    layers, high, wide = batch.image_grid_I3[1].tolist()
    assert [len(matrix[0]) for matrix in matrices[1:]] == [high * wide] * layers == [high * wide] * 2
    expected = torch.cat([matrix.mean(0).sum(0) for matrix in matrices]).view(-1, 4).mean(1)
    torch.testing.assert_close(torch.cat(states.received), expected, rtol=1e-4, atol=1e-5)
    assert [len(tokens) for tokens in states.tokens] == [len(keys) for keys in states.keys]
    assert all(torch.equal(a, b) for a, b in zip(states.tokens, plain.tokens, strict=True))


def pixels(tiles, seed=0):
    return torch.randn(tiles, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("layers", "made_by"), [([-1], 2), ([3], 2), ([-2], 1), ([-1, 1], 0)])
def test_statistics_are_those_of_the_layer_that_made_the_features(monkeypatch, layers, made_by):
    tower, tiles = onevision_family().model.model.vision_tower, pixels(3)
    features, received, keys = features_with_statistics(tower, tiles, layers)
    states = tower(tiles, output_hidden_states=True).hidden_states
    assert torch.equal(features, torch.cat([states[layer] for layer in layers], -1))
    ((weights, key),) = eager_calls(tower, tower.encoder.layers[made_by].self_attn, lambda: tower(tiles), monkeypatch)
    torch.testing.assert_close(received, weights.mean(1).sum(1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(keys, key.mean(1), rtol=1e-4, atol=1e-5)
    assert received.dtype == keys.dtype == torch.float32


def test_bf16_towers_give_statistics_in_fp32():
    tower = onevision_family().model.model.vision_tower.bfloat16()
    features, received, keys = features_with_statistics(tower, pixels(2).bfloat16(), [-1])
    assert (features.dtype, received.dtype, keys.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_embeddings_have_no_attention():
    tower = onevision_family().model.model.vision_tower
    refuses("past the embeddings, not 0 of 3 layers", features_with_statistics, tower, pixels(1), [0])
