"""LLaVA-1.5 and LLaVA-NeXT, random; weights are large enough that a wrong place or order shows.

LLaVA-1.5 has 16 visual tokens an image. LLaVA-NeXT, on Llama (as Vicuna) or Mistral, cuts pictures into two to five
tiles of 24 x 24 pixels and 3 x 3 patches, cropped on either side or on none.
"""

from functools import partial
from pathlib import Path

import torch
import transformers
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from checkpoints.tiny_llava import build_processor, build_tokenizer
from subtoken_train.datasets.records import Record
from subtoken_train.families.family import Family
from subtoken_train.families.llava import LlavaFamily, LlavaNextFamily
from tests.support.tiny import TOWER, TinyFamily, TinyPicture, decoder_sizes, padded, records_of


def build(kv_heads: int, window: int | None = None) -> LlavaFamily:
    """Of so many key-value heads; with a window, around a Mistral."""
    torch.manual_seed(0)
    tower = {**TOWER, "num_hidden_layers": 2}
    vision = transformers.CLIPVisionConfig(**tower, image_size=96, patch_size=24, projection_dim=32)
    text_class, own = (
        (transformers.LlamaConfig, {}) if window is None else (transformers.MistralConfig, {"sliding_window": window})
    )
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = text_class(**decoder_sizes(90, kv_heads, max_position_embeddings=512, **special, **own))
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=4, vision_feature_layer=-1
    )
    return LlavaFamily(transformers.LlavaForConditionalGeneration(config).eval(), build_processor())


def picture(family: Family, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    assert family.image_token_id is not None
    return TinyPicture([family.image_token_id] * 16, torch.randn(1, 3, 96, 96, generator=generator))


next_batch = padded
SIDE, PATCH = 24, 8
RESOLUTIONS = [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]]
SIZES = ((30, 50), (61, 17), (24, 71), (47, 49))  # (height, width) of the test images in pixels
TOKENS = (37, 45, 39, 51)


def next_processor() -> transformers.LlavaNextProcessor:
    image_processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=RESOLUTIONS
    )
    own = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return transformers.LlavaNextProcessor(image_processor, build_tokenizer(), image_token="<image>", **own)


def next_family(kind: str = "mistral", seed: int = 0, kv_heads: int = 2, **settings: object) -> LlavaNextFamily:
    """Three decoder layers of four query heads; ``kind`` is ``llama`` or ``mistral``."""
    torch.manual_seed(seed)
    vision = transformers.CLIPVisionConfig(
        **TOWER, image_size=SIDE, patch_size=PATCH, projection_dim=32, initializer_range=0.2
    )
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = decoder_sizes(len(build_tokenizer()), kv_heads, max_position_embeddings=1024, **special)
    text = (
        transformers.LlamaConfig(**sizes)
        if kind == "llama"
        else transformers.MistralConfig(**sizes, sliding_window=None)
    )
    config = transformers.LlavaNextConfig(
        vision_config=vision, text_config=text, image_token_index=4, image_grid_pinpoints=RESOLUTIONS, **settings
    )
    return LlavaNextFamily(transformers.LlavaNextForConditionalGeneration(config).eval(), next_processor())


def next_records(folder: Path) -> list[Record]:
    """One image; three of different sizes in two turns; text only."""
    turns = ("<image>\nwhat is left ?", "red"), ("<image><image>\nand now ?", "blue")
    one, text = ("<image>\nwhat is left ?", "the red"), ("what is left ?", "blue")
    return records_of(folder, SIZES, one, turns, text)


def next_picture(family: Family, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    assert isinstance(family, LlavaNextFamily)
    size = SIZES[(sample + image) % len(SIZES)]
    tiles = family.layout.tiles(size)
    pixels = torch.randn(tiles, 3, SIDE, SIDE, generator=generator)
    return TinyPicture([family.image_token_id] * family.visual_tokens(size), pixels, [tiles, *size])


FAMILIES = (
    TinyFamily("llava", partial(build, 4), picture, order=0),
    TinyFamily("llava_gqa", partial(build, 2), picture, order=0),
    TinyFamily("llava_window", partial(build, 2, 20), picture, windowed=True, order=0),
    TinyFamily("llava_next", next_family, next_picture, order=3),
)
