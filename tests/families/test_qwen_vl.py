"""Qwen's VLMs and GLM's: sizes, mRoPE ids, deep features, experts; videos beside images are transformers'."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from subtoken_train import SubTokenModel
from subtoken_train.datasets.collate import encode
from subtoken_train.datasets.records import Record
from subtoken_train.families.images import Video
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from subtoken_train.types import Region, Turn
from tests.support.helpers import compress, unread
from tests.support.plain_parts import prompt_positions
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.tiny import qwen, tiny_families
from tests.support.tiny.qwen import qwen_video
from tests.support.truth_cells import CELL, difference

FAMILY = qwen.qwen_family()
PICTURES = [Image.effect_noise((160, 100), 60).convert("RGB"), qwen.qwen_video(4)]
GLM = qwen.glm_family()


@pytest.fixture
def family():
    return qwen.qwen_family()


@pytest.fixture
def records(tmp_path):
    return qwen.qwen_records(tmp_path)


@given(height=st.integers(1, 400), width=st.integers(1, 400), cap=st.sampled_from([3136, 20_000, 112_896, 1_003_520]))
def test_counted_tokens_are_what_the_processor_makes(height, width, cap):
    pixels, _ = qwen.made_as_counted(FAMILY, height, width, cap)
    assert pixels.shape[1] == 3 * 2 * 14 * 14


@pytest.mark.parametrize("pad_left", [False, True])
def test_positions_of_several_images_and_text_on_either_side(family, records, pad_left):
    batch = qwen.qwen_batch(family, records, pad_left)
    expected = torch.zeros(3, *batch.input_ids_BN.shape, dtype=torch.long)
    for sample, marks in enumerate(batch.regions_BN != Region.PADDING):
        expected[:, sample, marks] = prompt_positions(family, batch, sample)
    assert torch.equal(family.positions(batch), expected)
    text = qwen.qwen_batch(family, [records[2], records[2]], pad_left)
    assert torch.equal(family.positions(text)[0], torch.arange(text.input_ids_BN.shape[1]).expand(2, -1))


@pytest.mark.parametrize("grid", [None, [[1, 6, 8], [1, 4, 14], [1, 10, 6]], [[1, 6, 8], [1, 10, 6]]])
def test_image_tokens_that_are_not_the_images_are_refused(family, records, grid):
    batch = qwen.qwen_batch(family, records)
    batch.image_grid_I3 = None if grid is None else torch.tensor(grid)
    refuses(r"runs of \[12, 15, 14\] image tokens in the batch of records one, two, text", family.positions, batch)


@torch.no_grad()
def test_nothing_is_kept_between_batches(family, records):
    """Neither our passes nor what a call of the model left behind shifts the next batch."""
    first = qwen.qwen_batch(family, records[:1], generation=True)
    second = qwen.qwen_batch(family, records[1:], pad_left=True)
    fresh = compress(copy.deepcopy(family)).run(second).hidden_BMD
    backbone = compress(family)
    backbone.run(first)
    assert family.model.model.rope_deltas is None
    assert torch.equal(backbone.run(second).hidden_BMD, fresh)
    family.model.model.rope_deltas = torch.tensor([[77], [78]])
    assert torch.equal(backbone.run(second).hidden_BMD, fresh)


def test_images_are_padded_to_squares_where_that_is_asked_for(family):
    """The same pixels and tokens as of an image that was put on the processor's mean by hand."""
    image = Image.effect_noise((90, 40), 60).convert("RGB")
    mean = tuple(round(255 * mean) for mean in family.processor.image_processor.image_mean)
    square = Image.new("RGB", (90, 90), mean)
    square.paste(image, (0, 25))
    pixels, grid = family.process_images([square])
    shape = family.process_images([image])[1]
    video = qwen.qwen_video(2, (40, 90))
    frames = family.frame_size(video)
    family.pad_images()
    assert family.frame_size(video) == frames  # it keeps its shape
    own_pixels, own_grid = family.process_images([image])
    assert torch.equal(own_pixels, pixels)
    assert own_grid.tolist() == grid.tolist() != shape.tolist()
    assert family.visual_tokens((40, 90)) == family.grid_tokens(grid[0].tolist())
    assert np.array_equal(np.asarray(family.framed(image)), np.asarray(square))
    assert family.visual_tokens((1, 2001)) == family.visual_tokens((2001, 2001))  # no side is 200 times the other
    refuses("is larger than 13,377 a side", family.visual_tokens, (1, 60_000))


@pytest.fixture(scope="module")
def deep_family():
    return qwen.qwen3_family()


def batch_with(deep_family, *pictures):
    inputs = inputs_of(deep_family, "first " + "<image> then " * len(pictures) + "where ?", pictures)
    return batch_from_inputs(deep_family, inputs["input_ids"], inputs["attention_mask"].bool(), inputs, None)


def test_deep_features_meet_the_rows_that_are_there_and_count(deep_family):
    """Rows that a reducer drops take theirs along: what stays runs as if by transformers' decoder with these alone."""
    batch = batch_with(deep_family, *PICTURES)
    result = compress(deep_family, name="fastv", keep_ratio=0.25).run(batch)
    kept = result.rows.index_BM[0]
    states = deep_family.visual_states(batch)
    deep_nTD = torch.cat(states.deep, 1)
    visual = deep_family.is_visual(batch.input_ids_BN[0])
    number = visual.cumsum(0) - 1
    shown = visual[kept]
    assert 0 < int(shown.sum()) < int(visual.sum())
    embeds = deep_family.embed(batch, states)[:, kept]
    settings = {"inputs_embeds": embeds, "position_ids": deep_family.positions(batch)[..., kept], "use_cache": False}
    features = [each[number[kept[shown]]] for each in deep_nTD]
    expected = deep_family.decoder(**settings, visual_pos_masks=shown[None], deepstack_visual_embeds=features)
    found = deep_family.decoder.norm(result.hidden_BMD)
    torch.testing.assert_close(found, expected.last_hidden_state, rtol=1e-4, atol=1e-4)
    assert (found - deep_family.decoder(**settings).last_hidden_state).abs().max() > 0.1


def test_merged_tokens_keep_their_targets_deep_features(deep_family):
    batch = batch_with(deep_family, PICTURES[0])
    result = compress(deep_family, name="visionzip", keep_ratio=0.5).run(batch)
    states = deep_family.visual_states(batch, "received")
    merged = compress(deep_family, name="visionzip", keep_ratio=0.5).reducer.merge(states, unread(states))
    assert len(merged.tokens[0]) == int(merged.slots[0].sum()) == int((result.rows.regions_BM == Region.VISUAL).sum())
    shown = batch.regions_BN[0, result.rows.index_BM[0]] == Region.VISUAL
    assert torch.equal(result.rows.deep_nBMD[:, 0, shown], states.deep[0][:, merged.slots[0]])
    assert not result.rows.deep_nBMD[:, 0, ~shown].any()


@given(height=st.integers(1, 400), width=st.integers(1, 400), cap=st.sampled_from([3136, 20_000, 112_896, 1_003_520]))
@example(height=1, width=2, cap=3136)
def test_counted_tokens_of_glm_are_what_its_processor_makes(height, width, cap):
    _, grid = qwen.made_as_counted(GLM, height, width, cap)
    most = max(cap, 28 * max(height, width) * 28 / min(height, width))
    if round(height / 28) * round(width / 28) * 28**2 < GLM.min_pixels:  # scaled up, perhaps past the cap
        most = max(most, 4 * GLM.min_pixels)
    assert grid.prod() * 14**2 <= most


ROUTED = {**CELL, "scope": "context", "batch": "three_left", "protocol": "query_aware"}
CELLS = {
    "cut": {"reducer": "fastv_decoder", "eviction": "snapkv"},
    "shortened": {"reducer": "fastv_embeds", "eviction": "none", "batch": "last_right"},
    "merged": {"reducer": "visionzip", "eviction": "own_sets", "batch": "text_right"},
    "dropped": {"reducer": "sparsevlm", "selector": "none", "eviction": "kvzip"},
}


@sampled("cell", CELLS, every=3)
@pytest.mark.parametrize("name", ["qwen3_vl_moe", "glm4v_moe"])
def test_experts_between_packed_layers_are_those_of_a_full_recompute(name, cell):
    """In fp32: rounded states can choose other experts."""
    found = difference(ROUTED | CELLS[cell] | {"family": name}, 8)
    assert found.fits("fp32"), found


TINY = tiny_families()
PROCESSORS = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}
PROCESSORS |= {"qwen3_vl_moe": Qwen3VLProcessor, "glm4v": Glm4vProcessor, "glm4v_moe": Glm4vProcessor}
AROUND = {"glm4v": ("<|begin_of_video|>{}<|end_of_video|>", "<|begin_of_image|>{}<|end_of_image|>")}
AROUND["glm4v_moe"] = AROUND["glm4v"]
"""What a chat template has around a video and an image, where ``picture_text`` writes it."""
PICTURE = Image.effect_noise((100, 70), 60).convert("RGB")
KINDS = {
    "images": [PICTURE, PICTURE.resize((64, 150))],
    "video": [qwen_video(5, fps=2.0)],
    "mixed": [qwen_video(3, fps=0.5), PICTURE, qwen_video(4, (50, 120), seed=1)],
    "text": [],
}

pytestmark = pytest.mark.filterwarnings("ignore:the prompt has no image")  # as the pictures of "text" have it


@pytest.fixture(params=PROCESSORS)
def vlm(request):
    return TINY[request.param].build()


def prompt_of(pictures):
    marks = ["<video>" if isinstance(picture, Video) else "<image>" for picture in pictures]
    return "first " + " then ".join(marks) + " where is the 7 ?"


def inputs_for(vlm, pictures):
    return SubTokenModel.around(compress(vlm)).inputs(prompt_of(pictures), pictures)


def patches_by_hand(pixels_F3HW, side):
    """Layer by layer, 2 x 2 patches at a time: channel, frame, row, column."""
    if len(pixels_F3HW) % 2:
        pixels_F3HW = torch.cat([pixels_F3HW, pixels_F3HW[-1:]])
    pairs = pixels_F3HW.unflatten(0, (-1, 2)).transpose(1, 2)
    squares = [block for pair in pairs for band in pair.split(2 * side, 2) for block in band.split(2 * side, 3)]
    cuts = [cut for block in squares for band in block.split(side, 2) for cut in band.split(side, 3)]
    return torch.stack([cut.flatten() for cut in cuts])


@pytest.mark.parametrize("frames", [1, 4, 5])
def test_patches_of_a_video_are_those_of_its_layers(vlm, frames):
    video, processor = qwen_video(frames), vlm.processor.image_processor
    pixels, grid = vlm.process_images([video])
    high, wide = vlm.frame_size(video)
    side = vlm.vision.patch_size
    assert grid.tolist() == [[-(-frames // 2), high // side, wide // side]]
    scaled = [frame.resize((wide, high), Image.Resampling.BICUBIC) for frame in video.frames]
    values = torch.stack([torch.tensor(list(frame.getdata())).float().view(high, wide, 3) for frame in scaled]) / 255
    values = (values - torch.tensor(processor.image_mean)) / torch.tensor(processor.image_std)
    torch.testing.assert_close(pixels, patches_by_hand(values.permute(0, 3, 1, 2), side), rtol=1e-5, atol=1e-6)


def test_placeholders_are_what_the_processor_writes(vlm):
    """By the methods of transformers' own class; its video processor itself needs torchvision."""
    video = qwen_video(5, fps=2.0)
    _, grid = vlm.process_images([video])
    theirs = object.__new__(PROCESSORS[vlm.name])
    theirs.video_processor = theirs.image_processor = vlm.processor.image_processor
    theirs.audio_token = None
    theirs.vision_start_token, theirs.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    theirs.image_token, theirs.video_token = vlm.processor.image_token, vlm.processor.video_token
    metadata = VideoMetadata(total_num_frames=5, fps=2.0, frames_indices=list(range(5)))
    made = theirs.replace_video_token({"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
    of_video, of_image = AROUND.get(vlm.name, ("{}", "{}"))
    assert vlm.picture_text(video, theirs.image_token) == of_video.format(made)
    layers, high, wide = grid[0].tolist()
    assert made.count(theirs.video_token) == layers * high * wide // 4
    _, image_grid = vlm.process_images([PICTURE])
    image = theirs.replace_image_token({"image_grid_thw": image_grid}, 0)
    assert vlm.picture_text(PICTURE, theirs.image_token) == of_image.format(image)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_read_back_are_the_batch_and_collate_makes_the_same(vlm, kind):
    pictures = KINDS[kind]
    inputs = inputs_for(vlm, pictures)
    batch = batch_from_inputs(vlm, inputs["input_ids"], inputs["attention_mask"].bool(), inputs, None)
    assert batch.images_per_sample_B.tolist() == [len(pictures)]
    if pictures:
        pixels, grid = vlm.process_images(pictures)
        assert torch.equal(batch.pixel_values, pixels)
        assert torch.equal(batch.image_grid_I3, grid)
    expected, found = vlm.seconds(pictures), batch.seconds_I
    assert (expected is None) == (found is None)
    assert expected is None or torch.equal(expected, found)
    prompt = prompt_of(pictures).replace("<video>", "<image>")
    sample = encode(Record("one", [], [Turn(prompt, None)]), vlm, 2048, pictures, generation=True)
    assert sample.input_ids == inputs["input_ids"][0].tolist()
    assert sample.regions == batch.regions_BN[0].tolist()
    assert sample.rank_position == (int(batch.rank_position_B[0]) if pictures else -1)
    assert torch.equal(vlm.is_visual(batch.input_ids_BN[0]), batch.regions_BN[0] == Region.VISUAL)


def one_forward(vlm, inputs, pictures):
    """Transformers' logits; GLM's forward takes no images beside videos, whose features are given to it then."""
    vlm.model.model.rope_deltas = None
    if vlm.name not in AROUND or len({type(picture) for picture in pictures}) < 2:
        return vlm.model(**inputs).logits
    own, (pixels, grid_I3) = vlm.model.model, vlm.process_images(pictures)
    patches = zip(pixels.split(grid_I3.prod(-1).tolist()), grid_I3, strict=True)
    features = [own.get_video_features(each, grid[None]).pooler_output[0] for each, grid in patches]
    ids, names = inputs["input_ids"], ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
    embeds = own.get_input_embeddings()(ids).masked_scatter(vlm.is_visual(ids)[..., None], torch.cat(features))
    position_ids, _ = own.get_rope_index(ids, **{name: inputs[name] for name in names})
    return vlm.model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], position_ids=position_ids).logits


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_transformers_own(vlm, kind):
    """Bit for bit where its tower runs once; in mixed prompts it runs images and videos apart."""
    inputs = inputs_for(vlm, KINDS[kind])
    expected = one_forward(vlm, inputs, KINDS[kind])
    vlm.model.model.rope_deltas = None
    backbone = compress(vlm)
    batch = batch_from_inputs(vlm, inputs["input_ids"], inputs["attention_mask"].bool(), inputs, None)
    logits = backbone.logits(backbone.run(batch))
    if kind == "mixed":
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(logits, expected)
    gathered = compress(vlm, name="fastv", keep_ratio=1.0)
    torch.testing.assert_close(gathered.logits(gathered.run(batch, force_gather=True)), expected, rtol=1e-5, atol=1e-5)


def test_a_video_is_bounded_like_a_few_images(vlm):
    vlm.limit_pixels(vlm.unit**2 * 16)
    long = Video([Image.new("RGB", (640, 480))] * 64)
    high, wide = vlm.frame_size(long)
    assert vlm.layers(long) == 32
    assert high * wide <= 4 * 16 * vlm.unit**2 / 32 or high * wide <= vlm.min_pixels * 2
    with pytest.raises(ValueError, match=rf"an image of 2 x 900 pixels: {vlm.name} takes sides of 1 to 200"):
        vlm.picture_text(Video([Image.new("RGB", (900, 2))]), "")


def test_what_is_not_the_processors_output_is_refused(vlm):
    inputs = inputs_for(vlm, KINDS["video"])
    model = SubTokenModel.around(compress(vlm))
    with pytest.raises(ValueError, match=r"pixel_values_videos of .* must be .* with video_grid_thw"):
        model.generate(**{**inputs, "video_grid_thw": None})
    pixels = inputs["pixel_values_videos"]
    third = {"video_grid_thw": inputs["video_grid_thw"] // torch.tensor([3, 1, 1])}
    third["pixel_values_videos"] = pixels[: len(pixels) // 3]
    refuses(r"images of \[\d+\] visual tokens but runs of \[.*\] image tokens", model.generate, **{**inputs, **third})
    if vlm.name == "qwen2_5_vl":
        with pytest.raises(ValueError, match="second_per_grid_ts has 2 values for 1 videos"):
            model.generate(**{**inputs, "second_per_grid_ts": torch.tensor([1.0, 1.0])})
    with pytest.raises(ValueError, match="picture 1 is an image, and the prompt has <video> in its place"):
        model.inputs("<video> and <image>", [PICTURE, qwen_video(2)])
