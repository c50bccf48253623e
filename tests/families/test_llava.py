"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: prompts, placeholders, pixels, features, statistics of tiles, files."""

import json

import pytest
import torch
from PIL import Image

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.images import Video
from subtoken_train.families.llava_onevision import LlavaOnevisionFamily
from subtoken_train.families.load import load_family
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from subtoken_train.types import Region, Turn
from tests.support.helpers import make_batch, save_backbone
from tests.support.refusals import refuses
from tests.support.tiny import noises
from tests.support.tiny.llava import SIZES, next_batch, next_family, next_records
from tests.support.tiny.llava_onevision import FRAME, WHOLE, noise, onevision_family, onevision_records, their_processor
from tests.support.tiny.llava_onevision import SIZES as OV_SIZES
from tests.support.tiny.qwen import qwen_batch


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


def test_a_wrong_number_of_image_tokens_names_the_records(tiny_family):
    batch = make_batch([(1, 9), (0, 5)])
    batch.input_ids_BN[0, 2] = 11
    refuses(r"63 image tokens but 64 visual features .* records sample-0, sample-1", tiny_family.embed, batch)


@pytest.fixture(scope="module")
def next_one():
    return next_family()


def test_newlines_are_projected_to_their_embedding_and_know_no_tile(next_one, tmp_path):
    states = next_one.visual_states(next_batch(next_one, next_records(tmp_path)), "received")
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


def test_a_patchs_attention_is_that_of_its_own_tiles_class_token(next_one, tmp_path):
    batch = next_batch(next_one, next_records(tmp_path)[:1])
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


@pytest.fixture
def family():
    return onevision_family()


def video(frames, seed=0, size=(30, 44)):
    return Video(tuple(noise(*size, seed=seed + i) for i in range(frames)))


@pytest.mark.parametrize("together", [1, 2, 3])
def test_prompts_and_pixels_are_transformers(family, together):
    pictures = [noise(*size, seed=i) for i, size in enumerate(OV_SIZES[:together])]
    mine = inputs_of(family, "<image>\n" * together + "where is the 7?", pictures)
    rendered = family.render([Turn("<image>\n" * together + "where is the 7?")])
    theirs = their_processor(family)(text=rendered.text, images=[pictures], return_tensors="pt")
    assert set(mine) == set(theirs)
    for name in theirs:
        assert torch.equal(mine[name], theirs[name]), name


def test_a_videos_prompt_is_transformers(family):
    mine = inputs_of(family, "<image>\nwhat moves?", [video(3)])
    text = family.render([Turn("<image>\nwhat moves?")]).text.replace("<image>", "<video>")
    theirs = their_processor(family)(text=text, videos=[list(video(3).frames)], return_tensors="pt")
    assert set(mine) == set(theirs)
    for name in theirs:
        assert torch.equal(mine[name], theirs[name]), name
    assert int(family.is_visual(mine["input_ids"]).sum()) == 3 * FRAME + 1


def test_features_are_transformers_in_order(family, tmp_path):
    states = family.visual_states(qwen_batch(family, onevision_records(tmp_path)))
    shown = [noise(*size, i) for i, size in enumerate(OV_SIZES)]
    theirs = their_processor(family).image_processor([shown[2:], shown[:2]], return_tensors="pt")
    expected = family.model.model.get_image_features(**theirs).pooler_output
    assert [len(tokens) for tokens in states.tokens] == [WHOLE + 6 * 7, WHOLE + 1, WHOLE + 1]
    assert all(torch.equal(mine, other) for mine, other in zip(states.tokens, expected, strict=True))
    assert states.cls is states.received is states.keys is None


def test_a_videos_features_are_an_entry_for_each_frame_with_the_newline_on_the_last(family):
    given = inputs_of(family, "what moves?", [video(2), noise(20, 20), video(2, 5)])
    batch = batch_from_inputs(family, given["input_ids"], given["attention_mask"].bool(), given, None)
    assert batch.image_grid_I3.tolist() == [[2, 0, 0], [2, 20, 20], [2, 0, 0]]
    assert batch.images_per_sample_B.tolist() == [3]
    states = family.visual_states(batch, "received")
    assert [len(tokens) for tokens in states.tokens] == [FRAME, FRAME + 1, WHOLE + 3 * 4, FRAME, FRAME + 1]
    for own, start in ((0, 0), (1, 3)):
        theirs = family.model.model.get_video_features(given["pixel_values_videos"][own][None]).pooler_output[0]
        torch.testing.assert_close(torch.cat(states.tokens[start : start + 2]), theirs, rtol=1e-5, atol=1e-5)
    assert [float(received[-1]) == 0 for received in states.received] == [False, True, True, False, True]
    assert [len(keys) for keys in states.keys] == [len(tokens) for tokens in states.tokens]
    visual = family.is_visual(batch.input_ids_BN)
    assert torch.equal(visual, batch.regions_BN == Region.VISUAL)
    assert int(visual.sum()) == sum(len(tokens) for tokens in states.tokens)


def test_what_the_processor_made_is_read_back_for_a_batch_of_prompts(family):
    """A prompt of one image, one of two, one without; tiles that pad are left out."""
    images = [[noise(*OV_SIZES[2])], [noise(*size) for size in OV_SIZES[:2]], []]
    prompts = [family.render([Turn("<image>" * len(own) + "what?")]).text for own in images]
    given = their_processor(family)(text=prompts, images=images, return_tensors="pt", padding=True)
    batch = batch_from_inputs(family, given["input_ids"], given["attention_mask"].bool(), given, None)
    pixels, grid = family.process_images([image for own in images for image in own], [1, 2, 2])
    assert torch.equal(batch.pixel_values, pixels)
    assert torch.equal(batch.image_grid_I3, grid)
    assert batch.images_per_sample_B.tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixel_values": torch.zeros(2, 3, 24, 24)}, r"must be \[images, tiles, 3, height, width\] with image_sizes"),
        ({"image_sizes": None}, "pass the processor's whole output"),
        ({"image_sizes": torch.tensor([[0, 30]])}, "pass the processor's whole output"),
        ({"image_sizes": torch.tensor([[20, 300]])}, "pass the processor's whole output"),
        ({"batch_num_images": torch.tensor([2])}, "pass the processor's whole output"),
        ({"image_sizes": torch.tensor([[24, 24]])}, r"pictures of \[21\] visual tokens but prompts of \[24\]"),
        ({"pixel_values_videos": torch.zeros(1, 2, 3, 20, 24)}, r"must be \[videos, frames, 3, 24, 24\]"),
        ({"pixel_values_videos": torch.zeros(1, 2, 3, 24, 24)}, r"pictures of \[24, 9\] visual tokens but"),
        ({"image_grid_thw": torch.ones(1, 3)}, "image_grid_thw: llava_onevision takes pixel_values, image_sizes"),
    ],
)
def test_what_is_no_processors_output_is_refused(family, change, message):
    given = inputs_of(family, "what?", [noise(*OV_SIZES[0])]) | change
    refuses(message, lambda: batch_from_inputs(family, given["input_ids"], given["attention_mask"].bool(), given, None))


def test_videos_of_unequal_length_in_one_prompt_are_refused(family):
    with pytest.raises(ValueError, match=r"videos of \[2, 3\] frames in one prompt; sample as many of each"):
        inputs_of(family, "what moves?", [video(3), video(2)])


def test_another_tower_is_refused(family):
    family.model.config.vision_feature_select_strategy = "default"
    refuses(r"with a SigLIP tower whose patches all stay", LlavaOnevisionFamily, family.model, family.processor)
