"""Idefics3 and SmolVLM, random, with both processors: tiles of 32 x 32 pixels, 2 x 2 visual tokens, three to a side."""

from functools import partial
from typing import Any

import torch
from transformers import Idefics3Config, Idefics3Processor, SmolVLMConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.modeling_idefics3 import Idefics3ForConditionalGeneration
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMForConditionalGeneration

from subtoken_train.families.family import Family
from subtoken_train.families.idefics3 import Idefics3Family, SmolVLMFamily
from subtoken_train.families.idefics3 import Idefics3Processor as OwnProcessor
from tests.support.helpers import sharpen
from tests.support.tiny import TOWER, TinyFamily, TinyPicture, decoder_sizes
from tests.support.tiny.qwen import qwen_tokenizer

SIDE, LONGEST = 32, 96
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
)
SIZES = ((30, 70), (40, 20), (90, 91), (10, 64))  # (height, width) of the test images in pixels
GRIDS = ((2, 3), (3, 2), (3, 3), (1, 3))  # rows and columns of their tiles
KINDS: dict[str, tuple[Any, Any, type[Idefics3Family]]] = {
    "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Family),
    "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMFamily),
}


def idefics_tokenizer():
    """With the published names at both ends of a conversation."""
    tokenizer = qwen_tokenizer(SPECIAL, "<end_of_utterance>")
    tokenizer.bos_token = "<|im_start|>"
    return tokenizer


def idefics_family(kind: str = "smolvlm", seed: int = 0, kv_heads: int = 2, **settings: object) -> Idefics3Family:
    """Three decoder layers of four query heads, a tower of three."""
    torch.manual_seed(seed)
    tokenizer = idefics_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    own = {"bos_token_id": ids["<|im_start|>"], "pad_token_id": ids["<|endoftext|>"], "tie_word_embeddings": False}
    own |= {"eos_token_id": ids["<end_of_utterance>"]}
    text = {"model_type": "llama", **decoder_sizes(len(tokenizer), kv_heads, **own)}
    vision = {**TOWER, "image_size": SIDE, "patch_size": 8, "initializer_range": 0.2}
    make, model, family = KINDS[kind]
    config = make(
        text_config=text, vision_config=vision, image_token_id=ids["<image>"], tie_word_embeddings=False, **settings
    )
    return sharpen(family(model(config).eval(), OwnProcessor(tiler(), tokenizer)), 1 / 8)


def tiler(**settings: object) -> Idefics3ImageProcessorPil:
    sizes = {"size": {"longest_edge": LONGEST}, "max_image_size": {"longest_edge": SIDE}}
    return Idefics3ImageProcessorPil(**sizes, **settings)


def transformers_processor() -> Idefics3Processor:
    """Of the tiny model; SmolVLM's, which writes the same of images, needs a further package."""
    return Idefics3Processor(tiler(), idefics_tokenizer(), image_seq_len=4)


def picture(family: Family, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    """An image of 1, 4 or 5 tiles, each between its marks."""
    tiles = (5, 1, 4)[(sample + image) % 3]
    marks = ("<fake_token_around_image>", "<row_1_col_1>", "<global-img>")
    fake, row, whole = (family.tokenizer.convert_tokens_to_ids(mark) for mark in marks)
    shown = [family.image_token_id] * 4
    cut = [*shown, fake, row] * (tiles - 2) + [*shown, fake, whole] * (tiles > 1)
    pixels = torch.randn(tiles, 3, SIDE, SIDE, generator=generator)
    return TinyPicture(cut + shown, pixels, None, [fake, row if tiles > 1 else whole], [fake])


FAMILIES = (
    TinyFamily("smolvlm", idefics_family, picture, order=12),
    TinyFamily("idefics3", partial(idefics_family, "idefics3"), picture, order=12, crossed=False),
)
