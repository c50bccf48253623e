"""Qwen's VLMs and GLM's on videos and images in mixed order: inputs, positions, logits, answers are transformers'."""

import pytest
import torch
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
from subtoken_train.inference.prompt_inputs import batch_from_inputs
from subtoken_train.types import Region, Turn
from tests.support.helpers import compress
from tests.support.refusals import refuses
from tests.support.tiny import tiny_families
from tests.support.tiny.qwen import qwen_video

TINY = tiny_families()
PROCESSORS = {"qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}
PROCESSORS |= {"qwen3_vl_moe": Qwen3VLProcessor, "glm4v": Glm4vProcessor, "glm4v_moe": Glm4vProcessor}
AROUND = {"glm4v": ("<|begin_of_video|>{}<|end_of_video|>", "<|begin_of_image|>{}<|end_of_image|>")}
AROUND["glm4v_moe"] = AROUND["glm4v"]
"""What a chat template has around a video and an image, where ``picture_text`` writes it."""
PICTURE = Image.effect_noise((100, 70), 60).convert("RGB")
PICTURES = {
    "images": [PICTURE, PICTURE.resize((64, 150))],
    "video": [qwen_video(5, fps=2.0)],
    "mixed": [qwen_video(3, fps=0.5), PICTURE, qwen_video(4, (50, 120), seed=1)],
    "text": [],
}

pytestmark = pytest.mark.filterwarnings("ignore:the prompt has no image")  # as the pictures of "text" have it


@pytest.fixture(params=PROCESSORS)
def family(request):
    return TINY[request.param].build()


def prompt_of(pictures):
    marks = ["<video>" if isinstance(picture, Video) else "<image>" for picture in pictures]
    return "first " + " then ".join(marks) + " where is the 7 ?"


def inputs_of(family, pictures):
    return SubTokenModel.around(compress(family)).inputs(prompt_of(pictures), pictures)


def patches_by_hand(pixels_F3HW, side):
    """Layer by layer, 2 x 2 patches at a time: channel, frame, row, column."""
    if len(pixels_F3HW) % 2:
        pixels_F3HW = torch.cat([pixels_F3HW, pixels_F3HW[-1:]])
    pairs = pixels_F3HW.unflatten(0, (-1, 2)).transpose(1, 2)
    squares = [block for pair in pairs for band in pair.split(2 * side, 2) for block in band.split(2 * side, 3)]
    cuts = [cut for block in squares for band in block.split(side, 2) for cut in band.split(side, 3)]
    return torch.stack([cut.flatten() for cut in cuts])


@pytest.mark.parametrize("frames", [1, 4, 5])
def test_patches_of_a_video_are_those_of_its_layers(family, frames):
    video, processor = qwen_video(frames), family.processor.image_processor
    pixels, grid = family.process_images([video])
    high, wide = family.frame_size(video)
    side = family.vision.patch_size
    assert grid.tolist() == [[-(-frames // 2), high // side, wide // side]]
    scaled = [frame.resize((wide, high), Image.Resampling.BICUBIC) for frame in video.frames]
    values = torch.stack([torch.tensor(list(frame.getdata())).float().view(high, wide, 3) for frame in scaled]) / 255
    values = (values - torch.tensor(processor.image_mean)) / torch.tensor(processor.image_std)
    torch.testing.assert_close(pixels, patches_by_hand(values.permute(0, 3, 1, 2), side), rtol=1e-5, atol=1e-6)


def test_placeholders_are_what_the_processor_writes(family):
    """By the methods of transformers' own class; its video processor itself needs torchvision."""
    video = qwen_video(5, fps=2.0)
    _, grid = family.process_images([video])
    theirs = object.__new__(PROCESSORS[family.name])
    theirs.video_processor = theirs.image_processor = family.processor.image_processor
    theirs.audio_token = None
    theirs.vision_start_token, theirs.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    theirs.image_token, theirs.video_token = family.processor.image_token, family.processor.video_token
    metadata = VideoMetadata(total_num_frames=5, fps=2.0, frames_indices=list(range(5)))
    made = theirs.replace_video_token({"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
    of_video, of_image = AROUND.get(family.name, ("{}", "{}"))
    assert family.picture_text(video, theirs.image_token) == of_video.format(made)
    layers, high, wide = grid[0].tolist()
    assert made.count(theirs.video_token) == layers * high * wide // 4
    _, image_grid = family.process_images([PICTURE])
    image = theirs.replace_image_token({"image_grid_thw": image_grid}, 0)
    assert family.picture_text(PICTURE, theirs.image_token) == of_image.format(image)


@pytest.mark.parametrize("kind", PICTURES)
def test_inputs_read_back_are_the_batch_and_collate_makes_the_same(family, kind):
    pictures = PICTURES[kind]
    inputs = inputs_of(family, pictures)
    batch = batch_from_inputs(family, inputs["input_ids"], inputs["attention_mask"].bool(), inputs, None)
    assert batch.images_per_sample_B.tolist() == [len(pictures)]
    if pictures:
        pixels, grid = family.process_images(pictures)
        assert torch.equal(batch.pixel_values, pixels)
        assert torch.equal(batch.image_grid_I3, grid)
    expected, found = family.seconds(pictures), batch.seconds_I
    assert (expected is None) == (found is None)
    assert expected is None or torch.equal(expected, found)
    prompt = prompt_of(pictures).replace("<video>", "<image>")
    sample = encode(Record("one", [], [Turn(prompt, None)]), family, 2048, pictures, generation=True)
    assert sample.input_ids == inputs["input_ids"][0].tolist()
    assert sample.regions == batch.regions_BN[0].tolist()
    assert sample.rank_position == (int(batch.rank_position_B[0]) if pictures else -1)
    assert torch.equal(family.is_visual(batch.input_ids_BN[0]), batch.regions_BN[0] == Region.VISUAL)


def one_forward(family, inputs, pictures):
    """Transformers' logits; GLM's forward takes no images beside videos, whose features are given to it then."""
    family.model.model.rope_deltas = None
    if family.name not in AROUND or len({type(picture) for picture in pictures}) < 2:
        return family.model(**inputs).logits
    own, (pixels, grid_I3) = family.model.model, family.process_images(pictures)
    patches = zip(pixels.split(grid_I3.prod(-1).tolist()), grid_I3, strict=True)
    features = [own.get_video_features(each, grid[None]).pooler_output[0] for each, grid in patches]
    ids, names = inputs["input_ids"], ("mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
    embeds = own.get_input_embeddings()(ids).masked_scatter(family.is_visual(ids)[..., None], torch.cat(features))
    position_ids, _ = own.get_rope_index(ids, **{name: inputs[name] for name in names})
    return family.model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], position_ids=position_ids).logits


@pytest.mark.parametrize("kind", PICTURES)
def test_logits_are_transformers_own(family, kind):
    """Bit for bit where its tower runs once; in mixed prompts it runs images and videos apart."""
    inputs = inputs_of(family, PICTURES[kind])
    expected = one_forward(family, inputs, PICTURES[kind])
    family.model.model.rope_deltas = None
    backbone = compress(family)
    batch = batch_from_inputs(family, inputs["input_ids"], inputs["attention_mask"].bool(), inputs, None)
    logits = backbone.logits(backbone.run(batch))
    if kind == "mixed":
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(logits, expected)
    gathered = compress(family, name="fastv", keep_ratio=1.0)
    forced = gathered.logits(gathered.run(batch, force_gather=True))
    torch.testing.assert_close(forced, expected, rtol=1e-5, atol=1e-5)


def test_a_video_is_bounded_like_a_few_images(family):
    family.limit_pixels(family.unit**2 * 16)
    long = Video([Image.new("RGB", (640, 480))] * 64)
    high, wide = family.frame_size(long)
    assert family.layers(long) == 32
    assert high * wide <= 4 * 16 * family.unit**2 / 32 or high * wide <= family.min_pixels * 2
    with pytest.raises(ValueError, match=rf"an image of 2 x 900 pixels: {family.name} takes sides of 1 to 200"):
        family.picture_text(Video([Image.new("RGB", (900, 2))]), "")


def test_what_is_not_the_processors_output_is_refused(family):
    inputs = inputs_of(family, PICTURES["video"])
    model = SubTokenModel.around(compress(family))
    with pytest.raises(ValueError, match=r"pixel_values_videos of .* must be .* with video_grid_thw"):
        model.generate(**{**inputs, "video_grid_thw": None})
    pixels = inputs["pixel_values_videos"]
    third = {"video_grid_thw": inputs["video_grid_thw"] // torch.tensor([3, 1, 1])}
    third["pixel_values_videos"] = pixels[: len(pixels) // 3]
    refuses(r"images of \[\d+\] visual tokens but runs of \[.*\] image tokens", model.generate, **{**inputs, **third})
    if family.name == "qwen2_5_vl":
        with pytest.raises(ValueError, match="second_per_grid_ts has 2 values for 1 videos"):
            model.generate(**{**inputs, "second_per_grid_ts": torch.tensor([1.0, 1.0])})
    with pytest.raises(ValueError, match="picture 1 is an image, and the prompt has <video> in its place"):
        model.inputs("<video> and <image>", [PICTURE, qwen_video(2)])
