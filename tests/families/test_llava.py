"""The LLaVA family: chat text, images, embeddings, and the whole model's logits."""

import pytest
import torch
from PIL import Image

from subtoken_train.types import Region
from tests.support.helpers import make_batch


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
