"""The InternVL3 family: chat format, tiles, frames, transformers' own inputs, logits and answers."""

import numpy as np
import pytest
import torch
from PIL import Image

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.images import Video
from subtoken_train.families.load import layout_family
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from subtoken_train.types import Region, Turn
from tests.support.helpers import compress
from tests.support.own_forward import check_answers, check_logits
from tests.support.tiny.internvl import (
    SIDE,
    SIZES,
    TILES,
    internvl_batch,
    internvl_family,
    internvl_images,
    internvl_records,
    transformers_processor,
)

PROMPTS = [
    "<|im_start|>user\n<IMG_CONTEXT>\nwhere is it?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\n<IMG_CONTEXT>\n<IMG_CONTEXT>\nwhich?<|im_end|>\n<|im_start|>assistant\nthis<|im_end|>\n"
    "<|im_start|>user\n<IMG_CONTEXT>\nand now?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nwho are you?<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def family():
    return internvl_family()


@pytest.fixture(scope="module")
def images():
    return internvl_images()


@pytest.fixture
def records(tmp_path):
    return internvl_records(tmp_path)


def processed(images, side):
    """Three prompts of one, three and no images as transformers' processor makes them."""
    return transformers_processor()(text=PROMPTS, images=images, padding=True, padding_side=side, return_tensors="pt")


def batch_of(family, given):
    return batch_from_inputs(family, given["input_ids"], given["attention_mask"].bool(), given, None)


def test_the_format_is_the_published_template(family):
    turns = [Turn("<image>\nwhere is it?", " left "), Turn("<image>\n<image>\nand now?", "right"), Turn("last")]
    rendered = family.render(turns)
    messages = []
    for count, asked, answer in ((1, "where is it?", "left"), (2, "and now?", "right"), (0, "last", None)):
        content = [{"type": "image"}] * count + [{"type": "text", "text": asked}]
        messages.append({"role": "user", "content": content})
        if answer is not None:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    expected = transformers_processor().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered.text == expected
    assert [rendered.text[start:stop] for start, stop in rendered.answer_spans] == ["left<|im_end|>", "right<|im_end|>"]


def test_records_have_marks_of_text_around_their_tiles(family, records):
    batch = internvl_batch(family, records)
    assert batch.regions_BN.eq(Region.VISUAL).sum(-1).tolist() == [4 * TILES[0], 4 * sum(TILES[1:]), 0]
    assert len(batch.pixel_values) == sum(TILES)
    marks = [family.tokenizer.convert_tokens_to_ids(mark) for mark in ("<img>", "</img>")]
    visual = (batch.regions_BN[0] == Region.VISUAL).nonzero()[:, 0]
    around = [int(visual[0]) - 1, int(visual[-1]) + 1]
    assert batch.input_ids_BN[0, around].tolist() == marks
    assert batch.regions_BN[0, around].tolist() == [Region.SYSTEM, Region.QUERY]
    decoded = [family.tokenizer.decode(row[row != -100]) for row in batch.labels_BN]
    assert decoded == ["the left<|im_end|>", "left<|im_end|>right<|im_end|>", "there<|im_end|>"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_and_pixels_are_what_transformers_processor_makes(family, images, side):
    given = processed(images, side)
    assert (given["input_ids"] == family.image_token_id).sum(-1).tolist() == [12, 36, 0]
    assert torch.equal(family.process_images(images)[0], given["pixel_values"])
    batch = batch_of(family, given)
    assert batch.images_per_sample_B.tolist() == [1, 3, 0]
    ours = inputs_of(family, "where is it?", images[:1])
    alone = transformers_processor()(text=PROMPTS[:1], images=images[:1], return_tensors="pt")
    assert torch.equal(ours["input_ids"], alone["input_ids"])
    assert torch.equal(ours["pixel_values"], alone["pixel_values"])


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


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_are_transformers_own(family, images, side):
    given = processed(images, side)
    check_logits(family, given, batch_of(family, given), side)


def test_answers_are_transformers_own(family, images):
    check_answers(family, processed(images, "left"))


def test_logits_and_answers_on_qwen3_are_transformers_own(images):
    """As in InternVL3.5."""
    family, given = internvl_family(text_type="qwen3"), processed(images, "left")
    check_logits(family, given, batch_of(family, given), "left")
    check_answers(family, given)


def test_a_video_is_a_line_per_frame(family, images):
    frames = [image.resize((40, 30)) for image in images[:3]]
    given = inputs_of(family, "<video>\nwhat happens?", [Video(tuple(frames))])
    shown = "<img>" + "<IMG_CONTEXT>" * 4 + "</img>"
    words = f"<|im_start|>user\nFrame1: {shown}\nFrame2: {shown}\nFrame3: {shown}\nwhat happens?<|im_end|>\n"
    assert family.tokenizer.decode(given["input_ids"][0]) == f"{words}<|im_start|>assistant\n"
    whole = family.processor.image_processor(frames, crop_to_patches=False, return_tensors="pt")["pixel_values"]
    assert torch.equal(given["pixel_values"], whole)
    batch = batch_of(family, given)
    assert batch.images_per_sample_B.tolist() == [3]  # frames by frames, as transformers' processor gives them
    expected = family.model.generate(**given, max_new_tokens=5, do_sample=False)
    model = SubTokenModel.around(compress(family))
    assert torch.equal(model.generate(**given, max_new_tokens=5, do_sample=False), expected)


@torch.no_grad()
def test_a_token_receives_the_mean_of_its_four_patches(family, records):
    batch = internvl_batch(family, records)
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


@pytest.mark.parametrize(
    ("name", "weights", "shape"),
    [
        ("3-1B-hf", 938_193_024, (24, 2, 64)),
        ("3-2B-hf", 2_088_957_440, (28, 2, 128)),
        ("3-8B-hf", 7_944_373_760, (28, 4, 128)),
        ("3_5-8B-HF", 8_528_318_464, (36, 8, 128)),
        ("3_5-14B-HF", 15_119_523_840, (40, 8, 128)),
    ],
)
def test_published_models(name, weights, shape):
    family = layout_family(BackboneConfig(f"OpenGVLab/InternVL{name}", dtype="bfloat16"))
    own = family.shape
    assert (own.num_layers, own.num_kv_heads, own.head_dim) == shape
    assert sum(parameter.numel() for parameter in family.model.parameters()) == weights  # 1.9, 4.2, 15.9 GB on the Hub
    assert family.visual_tokens() == 5 * 256
    assert family.visual_tokens((480, 640)) == 13 * 256
    assert family.image_bytes() == 5 * 3 * 448 * 448 * 4
    family.limit_pixels(6 * 448 * 448 + 1)
    assert [family.visual_tokens(size) for size in ((480, 640), (400, 900), (448, 448))] == [7 * 256, 3 * 256, 256]


def test_what_it_does_not_take_is_refused_in_words(family, images):
    with pytest.raises(ValueError, match=r"vision_feature_layer -2 .* is not supported; -1 and default are"):
        internvl_family(vision_feature_layer=-2)
    with pytest.raises(ValueError, match=r"downsample_ratio 0.25 is not supported; square ones and 0.5 are"):
        internvl_family(downsample_ratio=0.25)
    with pytest.raises(ValueError, match="max_pixels=1000 is below one tile of internvl, 1024 pixels"):
        family.limit_pixels(1000)
    with pytest.raises(ValueError, match="reducer 'quest' evicts the context of a language model"):
        compress(family, name="quest", keep_ratio=0.5)
    given = processed(images, "left")
    with pytest.raises(ValueError, match=r"this internvl takes tiles \[tiles, 3, 32, 32\]"):
        batch_of(family, given | {"pixel_values": given["pixel_values"][..., :16]})
    with pytest.raises(ValueError, match=r"48 image tokens for 11 tiles: internvl takes 4 for each tile"):
        batch_of(family, given | {"pixel_values": given["pixel_values"][1:]})
    visual = given["input_ids"] == family.image_token_id
    given["input_ids"][0, visual[0].nonzero()[0, 0]] = 9
    with pytest.raises(ValueError, match=r"a run of 11 image tokens: internvl takes 4"):
        batch_of(family, given)


def test_an_image_processor_of_another_size_is_refused(images):
    family = internvl_family()
    family.processor.image_processor.size = {"height": 16, "width": 16}
    with pytest.raises(ValueError, match="use the processor of the same checkpoint"):
        family.process_images(images)
