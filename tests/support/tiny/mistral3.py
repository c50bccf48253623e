"""Mistral3 around two decoders, random, and transformers' inputs: pictures in many sizes, tokens of 16 x 16 pixels."""

from functools import partial

import torch
from PIL import Image
from transformers import BatchFeature, Mistral3Config
from transformers.models.mistral3.modeling_mistral3 import Mistral3ForConditionalGeneration
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from subtoken_train.families.family import Family
from subtoken_train.families.mistral3 import Mistral3Family, Mistral3Processor
from tests.support.helpers import sharpen
from tests.support.tiny import TOWER, TinyFamily, TinyPicture, decoder_sizes
from tests.support.tiny.qwen import qwen_tokenizer

PATCH, UNIT, LONGEST = 8, 16, 224
SPECIAL = ("<pad>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
SIZES = ((30, 60), (40, 20), (16, 33), (50, 460))
"""(height, width) of the test images in pixels; the last is scaled down."""
GRIDS = ((2, 4), (3, 2), (1, 3), (2, 14))  # rows and columns of their visual tokens


def mistral3_family(kind: str = "mistral", seed: int = 0, kv_heads: int = 2, **settings: object) -> Mistral3Family:
    """Three decoder layers of four query heads, a tower of three."""
    torch.manual_seed(seed)
    tokenizer = qwen_tokenizer(SPECIAL, "</s>")
    tokenizer.pad_token, tokenizer.bos_token = "<pad>", "<s>"
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    own = {"bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"], "pad_token_id": ids["<pad>"], "head_dim": 16}
    own |= {"sliding_window": None, "tie_word_embeddings": False}
    if kind == "ministral3":  # queries that grow from the 16th position on
        own["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.5}
        own["rope_parameters"]["original_max_position_embeddings"] = 16
    text = {"model_type": kind, **decoder_sizes(len(tokenizer), kv_heads, **own)}
    vision = {**TOWER, "model_type": "pixtral", "image_size": LONGEST, "patch_size": PATCH, "initializer_range": 0.2}
    config = Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=ids["[IMG]"], tie_word_embeddings=False, **settings
    )
    model = Mistral3ForConditionalGeneration(config).eval()
    tiler = PixtralImageProcessorPil(size={"longest_edge": LONGEST}, patch_size={"height": PATCH, "width": PATCH})
    return sharpen(Mistral3Family(model, Mistral3Processor(tiler, tokenizer)), 1 / 8)


def their_inputs(family: Mistral3Family, texts: list[str], images: list[Image.Image], side: str) -> BatchFeature:
    """As ``PixtralProcessor`` makes them, which needs torchvision: its lines for a picture's tokens, written again."""
    shown = family.processor.image_processor(images, patch_size={"height": UNIT, "width": UNIT}, return_tensors="pt")
    sizes = iter(shown["image_sizes"].tolist())
    for number in range(len(texts)):
        while "[IMG]" in texts[number]:
            height, width = next(sizes)
            rows = [["<img>"] * (width // UNIT) + ["[IMG_BREAK]"]] * (height // UNIT)
            tokens = [token for row in rows for token in row]
            tokens[-1] = "[IMG_END]"
            texts[number] = texts[number].replace("[IMG]", "".join(tokens), 1)
        texts[number] = texts[number].replace("<img>", "[IMG]")
    family.tokenizer.padding_side = side
    ids = family.tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    return BatchFeature({"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"], **shown})


def picture(family: Family, generator: torch.Generator, sample: int, image: int, images: int) -> TinyPicture:
    rows, columns = 3, 3 + sample + image
    end, row = (family.tokenizer.convert_tokens_to_ids(mark) for mark in ("[IMG_END]", "[IMG_BREAK]"))
    visual = [*[family.image_token_id] * columns, row] * rows
    pixels = torch.randn(4 * rows * columns, 3 * PATCH**2, generator=generator)
    return TinyPicture(visual[:-1], pixels, [1, 2 * rows, 2 * columns], [], [end])


FAMILIES = (
    TinyFamily("mistral3", mistral3_family, picture, order=13),
    TinyFamily("mistral3_ministral", partial(mistral3_family, "ministral3"), picture, order=13, crossed=False),
)
