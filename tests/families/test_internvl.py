"""The InternVL3 family: tiles of the originals, frames, and what merged tokens receive."""

import numpy as np
import pytest
import torch
from PIL import Image

from subtoken_train.families.images import Video
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from tests.support.helpers import compress
from tests.support.tiny.internvl import SIDE, SIZES, TILES, internvl_family
from tests.support.tiny_parts import noises, padded, three_records


@pytest.fixture(scope="module")
def family():
    return internvl_family()


@pytest.fixture(scope="module")
def images():
    return noises(SIZES)


def published_tiles(image: Image.Image, least: int, most: int) -> list[np.ndarray]:
    """``dynamic_preprocess`` of OpenGVLab's model cards, written down again: RGB tiles, the whole last."""
    grids = {(i, j) for n in range(least, most + 1) for i in range(1, n + 1) for j in range(1, n + 1)}
    grids = sorted((grid for grid in grids if least <= grid[0] * grid[1] <= most), key=lambda grid: grid[0] * grid[1])
    best, smallest, area = (1, 1), float("inf"), image.width * image.height
    for grid in grids:
        distance = abs(image.width / image.height - grid[0] / grid[1])
        if distance < smallest or (distance == smallest and area > 0.5 * SIDE * SIDE * grid[0] * grid[1]):
            best, smallest = grid, min(smallest, distance)
    scaled = np.array(image.resize((SIDE * best[0], SIDE * best[1]), Image.Resampling.BICUBIC))
    rows = [scaled[y * SIDE : (y + 1) * SIDE] for y in range(best[1])]
    tiles = [row[:, x * SIDE : (x + 1) * SIDE] for row in rows for x in range(best[0])]
    return tiles if len(tiles) == 1 else [*tiles, np.array(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC))]


def test_tiles_are_those_of_the_originals(family, images):
    expected = [tile for image in images for tile in published_tiles(image, 1, 5)]
    mean, std = (np.array(x) for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    found = family.process_images(images)[0]
    assert len(found) == len(expected) == sum(TILES)
    for ours, tile in zip(found, expected, strict=True):
        assert np.abs(ours.permute(1, 2, 0).numpy() - (tile / 255 - mean) / std).max() < 1e-5
    assert [family.tiles(size) for size in SIZES] == list(TILES)


def test_a_video_is_a_line_per_frame(family, images):
    frames = [image.resize((40, 30)) for image in images[:3]]
    given = inputs_of(family, "<video>\nwhat happens?", [Video(tuple(frames))])
    shown = "<img>" + "<IMG_CONTEXT>" * 4 + "</img>"
    words = f"<|im_start|>user\nFrame1: {shown}\nFrame2: {shown}\nFrame3: {shown}\nwhat happens?<|im_end|>\n"
    assert family.tokenizer.decode(given["input_ids"][0]) == f"{words}<|im_start|>assistant\n"
    whole = family.processor.image_processor(frames, crop_to_patches=False, return_tensors="pt")["pixel_values"]
    assert torch.equal(given["pixel_values"], whole)
    batch = batch_from_inputs(family, given["input_ids"], given["attention_mask"].bool(), given, None)
    assert batch.images_per_sample_B.tolist() == [3]  # frames by frames, as transformers' processor gives them
    expected = family.model.generate(**given, max_new_tokens=5, do_sample=False)
    model = SubTokenModel.around(compress(family))
    assert torch.equal(model.generate(**given, max_new_tokens=5, do_sample=False), expected)


@torch.no_grad()
def test_a_token_receives_the_mean_of_its_four_patches(family, tmp_path):
    batch = padded(family, three_records(tmp_path, SIZES))
    states, tower = family.visual_states(batch, "received"), family.model.model.vision_tower
    tower.set_attn_implementation("eager")
    seen = tower(batch.pixel_values, output_attentions=True)
    tower.set_attn_implementation("sdpa")
    received_Ihw = seen.attentions[-1][:, :, 0, 1:].sum(1).unflatten(1, (4, 4))
    expected_I22 = received_Ihw.unfold(1, 2, 2).unfold(2, 2, 2).mean((-1, -2))
    # tokens stand row by row
    torch.testing.assert_close(torch.stack(states.received), expected_I22.flatten(1))
    assert states.cls is None
    assert [tuple(keys.shape) for keys in states.keys] == [(4, 16)] * sum(TILES)
    unsplit = family.visual_states(batch, "unsplit")
    assert unsplit.keys[0].shape == (4, 32)
    features = family.project(torch.cat(states.tokens))
    own = family.model.get_image_features(batch.pixel_values).pooler_output.flatten(0, 1)
    assert torch.equal(features, own)
