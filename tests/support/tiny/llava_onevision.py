"""LLaVA-OneVision, random: one image in tiles (3 x 3 of 3 x 3 patches, crops of four), several whole, and a video."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from subtoken_train.datasets.records import Record
from subtoken_train.families.family import Family
from subtoken_train.families.images import Video
from subtoken_train.families.llava_onevision import LlavaOnevisionFamily, OnevisionProcessor
from tests.support import tiny
from tests.support.tiny import TOWER, TinyFamily, TinyPicture, decoder_sizes
from tests.support.tiny.qwen import qwen_records, qwen_tokenizer

noise = tiny.noise
SIDE, PATCH = 24, 8
RESOLUTIONS = [[SIDE * high, SIDE * wide] for high in (1, 2, 3) for wide in (1, 2, 3)]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
WHOLE, FRAME = 9, 4  # visual tokens of a picture's whole, and of a video's frame


def onevision_family(seed: int = 0, kv_heads: int = 2, layers: int = 4) -> LlavaOnevisionFamily:
    """Decoder layers of four query heads, a tower of three layers; weights are large, so that attention is sharp."""
    torch.manual_seed(seed)
    tokenizer = qwen_tokenizer(SPECIAL)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    special = {"bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    own = {"intermediate_size": 128, "num_hidden_layers": layers, "tie_word_embeddings": False, **special}
    text = {"model_type": "qwen2", **decoder_sizes(len(tokenizer), kv_heads, **own)}
    vision = transformers.SiglipVisionConfig(**TOWER, image_size=SIDE, patch_size=PATCH, vision_use_head=False)
    config = transformers.LlavaOnevisionConfig(
        text_config=text, vision_config=vision, image_token_index=ids["<image>"], video_token_index=ids["<video>"],
        image_grid_pinpoints=RESOLUTIONS, vision_aspect_ratio="anyres_max_4",
    )  # fmt: skip
    model = transformers.LlavaOnevisionForConditionalGeneration(config).eval()
    return LlavaOnevisionFamily(model, OnevisionProcessor(image_processor(), tokenizer))


def image_processor() -> LlavaOnevisionImageProcessorPil:
    return LlavaOnevisionImageProcessorPil(size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=RESOLUTIONS)


SIZES = ((20, 30), (40, 20), (70, 71))  # (height, width) of the test images in pixels


def onevision_records(folder: Path) -> list[Record]:
    """One image in tiles; two in two turns; text only."""
    return qwen_records(folder, SIZES, alone=2)


class FrameReader:
    """In the place of transformers' video processor, which needs torchvision: frames by the family's own code."""

    model_input_names = ("pixel_values_videos",)

    def __init__(self, family: LlavaOnevisionFamily) -> None:
        self.family = family

    def __call__(self, videos: list[Any], **options: Any) -> transformers.BatchFeature:
        pixels = [self.family.process_images([Video(tuple(frames))])[0] for frames in videos]
        return transformers.BatchFeature({"pixel_values_videos": torch.stack(pixels)})


class Theirs(transformers.LlavaOnevisionProcessor):
    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
        """Nothing is checked."""
        return type(argument)


def their_processor(family: LlavaOnevisionFamily) -> transformers.LlavaOnevisionProcessor:
    own = {"vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_4"}
    return Theirs(image_processor(), family.tokenizer, FrameReader(family), num_image_tokens=WHOLE, **own)


def picture(family: Family, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    """Draw a video of two frames as the second sample's first picture; three newlines, all alike, would tie."""
    assert isinstance(family, LlavaOnevisionFamily)
    placeholder, row = family.image_token_id, [1, 10, 40]
    if sample == 1 and image == 0:
        placeholder, row = family.model.config.video_token_id, [2, 0, 0]
    elif images == 1:
        size = (10, 40 + 20 * sample)
        row = [family.layout.tiles(size), *size]
    pixels = torch.randn(row[0], 3, SIDE, SIDE, generator=generator)
    assert placeholder is not None
    return TinyPicture([placeholder] * family.visual_rows(row), pixels, row)


FAMILIES = (TinyFamily("llava_onevision", partial(onevision_family, layers=3), picture, order=3),)
