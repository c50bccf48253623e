"""LLaVA-1.5 and LLaVA-NeXT: images, embeddings, newlines, statistics of tiles, and the files of checkpoints."""

import json

import pytest
import torch
from PIL import Image

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.types import Region
from tests.support.helpers import make_batch, save_backbone
from tests.support.tiny.llava import SIZES, TOKENS, next_batch, next_family, next_records
from tests.support.tiny_parts import noises


@pytest.mark.parametrize(("strategy", "tokens"), [("default", 64), ("full", 65)])
def test_visual_tokens(tiny_family, strategy, tokens):
    tiny_family.model.config.vision_feature_select_strategy = strategy
    assert tiny_family.visual_tokens() == tiny_family.visual_tokens((10, 500)) == tokens


def test_images_are_padded_to_a_square_of_the_mean_colour(tiny_family):
    pixels, _ = tiny_family.process_images([Image.new("RGB", (96, 48), (255, 0, 0)), Image.new("RGB", (30, 30))])
    assert pixels.shape == (2, 3, 96, 96)
    assert pixels[0, :, :20].abs().max() < 0.02  # mean colour is 0 after normalisation
    assert torch.allclose(pixels[0, :, 48, 48], torch.tensor([1.0, -1.0, -1.0]), atol=0.01)
    assert torch.allclose(pixels[1], torch.tensor(-1.0))


@torch.no_grad()
def test_features_stand_in_the_order_of_images_and_words_stay_words(tiny_family):
    batch = make_batch([(1, 9), (2, 7), (0, 12)])
    embeds = tiny_family.embed(batch)
    words = tiny_family.model.get_input_embeddings()(batch.input_ids_BN)
    visual = batch.regions_BN == Region.VISUAL
    features = tiny_family.model.model.get_image_features(pixel_values=batch.pixel_values).pooler_output
    assert torch.equal(embeds[~visual], words[~visual])
    assert torch.equal(embeds[visual], torch.cat(list(features)))


def test_a_wrong_number_of_image_tokens_names_the_records(tiny_family):
    batch = make_batch([(1, 9), (0, 5)])
    batch.input_ids_BN[0, 2] = 11
    with pytest.raises(ValueError, match=r"63 image tokens but 64 visual features .* records sample-0, sample-1"):
        tiny_family.embed(batch)


def test_geometry(tiny_family):
    shape = tiny_family.shape
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.element_bytes) == (4, 4, 32, 4)
    assert tiny_family.hidden_size == 128
    tiny_family.model.bfloat16()
    assert tiny_family.shape.element_bytes == 2


def test_positions_count_real_tokens_on_either_side(tiny_family):
    for pad_left, expected in ((False, [0, 1, 2, 3, 4, 4, 4]), (True, [0, 0, 0, 1, 2, 3, 4])):
        batch = make_batch([(0, 5), (0, 3)], pad_left)
        assert tiny_family.positions(batch)[1].tolist() == expected


@pytest.fixture(scope="module")
def next_one():
    return next_family()


@pytest.fixture
def drawn(tmp_path):
    return next_records(tmp_path)


def test_records_have_a_visual_row_for_every_patch_and_newline(next_one, drawn):
    batch = next_batch(next_one, drawn)
    assert batch.regions_BN.eq(Region.VISUAL).sum(-1).tolist() == [TOKENS[0], sum(TOKENS[1:]), 0]
    assert batch.image_grid_I3.tolist() == [[next_one.layout.tiles(size), *size] for size in SIZES]
    decoded = [next_one.tokenizer.decode(row[row != -100]) for row in batch.labels_BN]
    assert decoded == ["the red </s>", "red </s> blue </s>", "blue </s>"]


@torch.no_grad()
def test_newlines_are_projected_to_their_embedding_and_know_no_tile(next_one, drawn):
    batch = next_batch(next_one, drawn)
    states = next_one.visual_states(batch, "received")
    for tokens_TC, tiles_T, received_T, keys_Td, cls_IC, size in zip(
        states.tokens, states.tiles, states.received, states.keys, states.cls, SIZES, strict=True
    ):
        rows, columns = next_one.layout.crop(size)
        ends = 9 + torch.arange(1, rows + 1) * (columns + 1) - 1
        assert torch.equal((tiles_T == -1).nonzero()[:, 0], ends)
        assert torch.equal(next_one.project(tokens_TC)[ends], next_one.model.model.image_newline.expand(rows, -1))
        assert not received_T[ends].any()
        assert not keys_Td[ends].any()
        assert received_T[tiles_T >= 0].gt(0).all()
        assert tiles_T.max() + 1 == len(cls_IC) == next_one.layout.tiles(size)


@torch.no_grad()
def test_a_patchs_attention_is_that_of_its_own_tiles_class_token(next_one, drawn):
    batch = next_batch(next_one, drawn[:1])
    states, tower = next_one.visual_states(batch, "received"), next_one.model.model.vision_tower
    tower.set_attn_implementation("eager")
    seen = tower(batch.pixel_values, output_hidden_states=True, output_attentions=True)
    tower.set_attn_implementation("sdpa")
    layer = len(seen.hidden_states) - 3
    received_IP = seen.attentions[layer][:, :, 0, 1:].sum(1)
    tiles_T = states.tiles[0]
    torch.testing.assert_close(states.received[0][:9], received_IP[0])
    for tile in range(1, 5):
        own = states.received[0][tiles_T == tile]
        assert all(torch.isclose(value, received_IP[tile], rtol=1e-4).any() for value in own)
    torch.testing.assert_close(states.cls[0][:, :-1], seen.hidden_states[layer + 1][:, 0])


def test_the_files_of_a_published_checkpoint_are_read_without_torchvision(tmp_path):
    """Their ``preprocessor_config.json`` names the class that needs torchvision, and no patch size."""
    next_one, folder = next_family(), save_backbone(next_family(), tmp_path / "next")
    own = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(own | {"processor_class": "LlavaNextProcessor"}))
    read, images = load_family(BackboneConfig(str(folder))), noises(SIZES)
    assert torch.equal(read.process_images(images)[0], next_one.process_images(images)[0])
