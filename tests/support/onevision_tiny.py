"""A random tiny LLaVA-OneVision of the real classes: up to 3 x 3 tiles of 3 x 3 patches, crops of four at most."""

from __future__ import annotations

import torch
from PIL import Image
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, SiglipVisionConfig
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from subtoken_train.families.llava_onevision import LlavaOnevisionFamily
from subtoken_train.families.onevision_processor import OnevisionProcessor
from tests.support.qwen_tiny import qwen_tokenizer

SIDE, PATCH = 24, 8
RESOLUTIONS = [[SIDE * high, SIDE * wide] for high in (1, 2, 3) for wide in (1, 2, 3)]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
WHOLE, FRAME = 9, 4
"""Visual tokens of a picture's whole, and of a video's frame."""


def onevision_family(seed: int = 0, kv_heads: int = 2, layers: int = 4) -> LlavaOnevisionFamily:
    """Decoder layers of four query heads, a tower of three layers; weights are large, so that attention is sharp."""
    torch.manual_seed(seed)
    tokenizer = qwen_tokenizer(SPECIAL)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    text = {
        "model_type": "qwen2",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": False,
    }
    vision = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    config = LlavaOnevisionConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=ids["<image>"],
        video_token_index=ids["<video>"],
        image_grid_pinpoints=RESOLUTIONS,
        vision_aspect_ratio="anyres_max_4",
    )
    model = LlavaOnevisionForConditionalGeneration(config).eval()
    return LlavaOnevisionFamily(model, OnevisionProcessor(image_processor(), tokenizer))


def image_processor() -> LlavaOnevisionImageProcessorPil:
    """transformers' own, for these tiles."""
    return LlavaOnevisionImageProcessorPil(size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=RESOLUTIONS)


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    """A picture of (height, width) pixels."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())
