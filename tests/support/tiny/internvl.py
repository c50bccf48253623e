"""InternVL3, random, with both processors: pictures of one tile (32 x 32 pixels, 2 x 2 tokens), or of more and all."""

import torch
from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from subtoken_train.families.family import Family
from subtoken_train.families.internvl import InternVLFamily
from subtoken_train.families.internvl import InternVLProcessor as OwnProcessor
from tests.support.helpers import sharpen
from tests.support.tiny import TOWER, TinyFamily, TinyPicture, decoder_sizes
from tests.support.tiny.qwen import qwen_tokenizer

SIDE = 32
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
SIZES = ((30, 70), (40, 20), (33, 31), (64, 66))  # (height, width) of the test images in pixels
TILES = (3, 3, 1, 5)


def internvl_tokenizer():
    """With the names that transformers' processor asks for."""
    tokenizer = qwen_tokenizer(SPECIAL)
    names = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>", "video": "<video>"}
    for name, token in names.items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


def internvl_family(seed: int = 0, kv_heads: int = 2, text_type: str = "qwen2", **settings: object) -> InternVLFamily:
    """Three decoder layers of four query heads, a tower of three."""
    torch.manual_seed(seed)
    tokenizer = internvl_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    own = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}, "bos_token_id": None}
    own |= {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "tie_word_embeddings": False}
    text = {"model_type": text_type, **decoder_sizes(len(tokenizer), kv_heads, **own)}
    vision = {**TOWER, "attention_bias": True, "image_size": SIDE, "patch_size": 8}
    vision |= {"layer_scale_init_value": 1.0, "initializer_range": 0.2}
    config = InternVLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<IMG_CONTEXT>"], image_seq_length=4,
        tie_word_embeddings=False, **settings,
    )  # fmt: skip
    model = InternVLForConditionalGeneration(config).eval()
    with torch.no_grad():
        embeddings = model.model.vision_tower.embeddings  # which start at zero
        for parameter in (embeddings.cls_token, embeddings.position_embeddings):
            parameter.normal_(std=0.5)
    return sharpen(InternVLFamily(model, OwnProcessor(tiler(), tokenizer)), 1 / 8)


def tiler(**settings: object) -> GotOcr2ImageProcessorPil:
    means = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    return GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, max_patches=5, **means, **settings)


def transformers_processor() -> InternVLProcessor:
    """transformers' own; its class asks for a video processor, which needs torchvision."""
    made = InternVLProcessor.__new__(InternVLProcessor)
    made.attributes = ["image_processor", "tokenizer"]
    made.get_attributes = lambda: ["image_processor", "tokenizer"]
    InternVLProcessor.__init__(made, tiler(), internvl_tokenizer(), image_seq_length=4)
    return made


def picture(family: Family, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    tiles = (3, 1, 4)[(sample + image) % 3]
    start, end = (family.tokenizer.convert_tokens_to_ids(mark) for mark in ("<img>", "</img>"))
    pixels = torch.randn(tiles, 3, SIDE, SIDE, generator=generator)
    return TinyPicture([family.image_token_id] * (4 * tiles), pixels, None, [start], [end])


FAMILIES = (TinyFamily("internvl", internvl_family, picture, order=9),)
