"""What an image takes in a batch, and in the vision tower's pass, which runs without gradient before the decoder."""

from __future__ import annotations

from typing import Any

from subtoken_train.families.family import Family
from subtoken_train.training.activation_memory import FP32_BYTES


def image_bytes(family: Family) -> int:
    """Bytes of one image as a batch holds it (fp32), of the family's nominal size; 0 for a language model."""
    if family.image_token_id is None:
        return 0
    vision = family.model.config.vision_config
    if family.name == "llava":
        return int(FP32_BYTES * 3 * vision.image_size**2)
    return int(family.visual_tokens() * vision.spatial_merge_size**2 * _patch_bytes(vision))


def tower_bytes(family: Family, pixel_bytes: int) -> int:
    """Most that is live at once, with P patches of C channels and an MLP of I; 0 for a language model or without image.

    CLIP (LLaVA) returns every layer's hidden states, e C each; at work is an MLP: its input to the quick GELU, the
    sigmoid and their product, e I each. Qwen2.5-VL's blocks turn queries and keys in fp32: the two copies, the turned
    query, and three products of the key, 4 C each, beside query, key and value, the residual and the norm's output.
    Both hold the pixels (fp32 in ``pixel_bytes``) in their own dtype.
    """
    if family.image_token_id is None or not pixel_bytes:
        return 0
    vision, e = family.model.config.vision_config, family.shape.element_bytes
    pixels = 0 if e == FP32_BYTES else pixel_bytes * e // FP32_BYTES
    if family.name == "llava":
        patches = (vision.image_size // vision.patch_size) ** 2 + 1
        states = (vision.num_hidden_layers + 1) * vision.hidden_size
        return int(pixels + patches * e * (states + 3 * vision.intermediate_size))
    patches = pixel_bytes // _patch_bytes(vision)
    return int(pixels + patches * vision.hidden_size * (6 * FP32_BYTES + 5 * e))


def _patch_bytes(vision: Any) -> int:
    """A patch of Qwen2.5-VL's flattened pixels, fp32."""
    return int(FP32_BYTES * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
