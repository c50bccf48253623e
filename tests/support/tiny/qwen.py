"""Qwen's VLMs and GLM's, random, collated: images of 3 x 4 visual tokens and more, videos of two layers in turn."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import transformers
from hypothesis import assume
from PIL import Image
from torch import Tensor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from subtoken_train.datasets.records import Record
from subtoken_train.families import qwen_vl
from subtoken_train.families.images import Video
from tests.support.chats import byte_tokenizer
from tests.support.tiny import TinyFamily, TinyPicture, decoder_sizes, padded, records_of

qwen_batch = padded
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
SIZES = ((84, 112), (140, 84), (70, 200))
"""(height, width) of the test images in pixels: 3 x 4, 5 x 3 and 2 x 7 (resized) visual tokens."""
TOKENS = (12, 15, 14)
BLOCKS = {"depth": 4, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
BLOCKS |= {"initializer_range": 0.2}
"""Of the towers of Qwen2.5-VL and Qwen3-VL."""


def qwen_tokenizer(special: Sequence[str] = SPECIAL, end: str = "<|im_end|>") -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's special tokens; ``<|im_end|>`` ends a text, as in the published checkpoints."""
    text, named = "system You are a helpful assistant. user where is the 7? assistant", list(special[1:])
    ends = {"pad_token": "<|endoftext|>", "eos_token": end}
    return byte_tokenizer(special, 320, text, additional_special_tokens=named, **ends)


def _text(ids: dict[str, int], vocabulary: int, kv_heads: int, sections: list[int]) -> dict[str, object]:
    """Four decoder layers of four query heads, whose weights are large enough that a wrong position or order shows."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    special = {"bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    own = {"intermediate_size": 128, "num_hidden_layers": 4, "rope_parameters": rope, **special}
    return decoder_sizes(vocabulary, kv_heads, **own)


def _names(ids: dict[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
    }  # fmt: skip


def _made(seed: int) -> tuple[transformers.PreTrainedTokenizerFast, dict[str, int]]:
    torch.manual_seed(seed)
    tokenizer = qwen_tokenizer()
    return tokenizer, {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}


def _model(kind: str, text: dict, vision: dict, ids: dict[str, int]) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **ids)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()


def qwen_family(seed: int = 0, kv_heads: int = 2) -> qwen_vl.Qwen25VLFamily:
    """Qwen2.5-VL; a tower of four blocks, windows of 2 x 2 tokens in all but the second and the last."""
    tokenizer, ids = _made(seed)
    own = {"window_size": 56, "fullatt_block_indexes": [1, 3], "tokens_per_second": 2}
    model = _model("Qwen2_5_VL", _text(ids, len(tokenizer), kv_heads, [2, 3, 3]), {**BLOCKS, **own}, _names(ids))
    return qwen_vl.Qwen25VLFamily(model, qwen_vl.QwenProcessor(Qwen2VLImageProcessorPil(), tokenizer))


def qwen2_family(seed: int = 0, kv_heads: int = 2) -> qwen_vl.Qwen2VLFamily:
    tokenizer, ids = _made(seed)
    vision = {"depth": 3, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64, "initializer_range": 0.2}
    model = _model("Qwen2VL", _text(ids, len(tokenizer), kv_heads, [2, 3, 3]), vision, _names(ids))
    return qwen_vl.Qwen2VLFamily(model, qwen_vl.QwenProcessor(Qwen2VLImageProcessorPil(), tokenizer))


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def qwen3_family(seed: int = 0, kv_heads: int = 2, experts: bool = False) -> qwen_vl.Qwen3VLFamily:
    """Qwen3-VL; a tower of four blocks, of which two give deep features, and a grid of 6 x 6 learned positions."""
    tokenizer, ids = _made(seed)
    own = {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}
    text = {**_text(ids, len(tokenizer), kv_heads, [4, 2, 2]), "head_dim": 16, **(EXPERTS if experts else {})}
    kind = "Qwen3VLMoe" if experts else "Qwen3VL"
    model = _model(kind, text, {**BLOCKS, **own}, _names(ids))
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    pictures = Qwen2VLImageProcessorPil(patch_size=16, min_pixels=4 * 32 * 32)
    return getattr(qwen_vl, f"{kind}Family")(model, qwen_vl.QwenProcessor(pictures, tokenizer))


def qwen_video(count: int, size: tuple[int, int] = (60, 90), fps: float = 1.0, seed: int = 0) -> Video:
    frames = torch.randint(256, (count, 3, *size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Video([Image.fromarray(frame.permute(1, 2, 0).numpy().copy()) for frame in frames], fps)


def made_as_counted(family: qwen_vl.QwenVLFamily, height: int, width: int, cap: int) -> tuple[Tensor, Tensor]:
    """Patches and grid of an image of a hypothesis test, which are as many as the family counted beforehand."""
    assume(max(height, width) <= 200 * min(height, width))
    family.limit_pixels(cap)
    pixels, grid = family.process_images([Image.new("RGB", (width, height))])
    assert family.visual_tokens((height, width)) == int(grid.prod()) // 4
    assert len(pixels) == int(grid.prod())
    return pixels, grid


def qwen_records(folder: Path, sizes: Sequence[tuple[int, int]] = SIZES, alone: int = 0) -> list[Record]:
    """One image; two images of different sizes in two turns; text only."""
    turns = ("<image>\nwhere is the 7?", "left"), ("and here?\n<image>", "on the right")
    one, text = ("<image>\nwhere is the 7?", "there it is"), ("who are you?", "a helpful assistant")
    return records_of(folder, sizes, one, turns, text, alone)


ANSWERS = ("there it is", ("left", "on the right"), "a helpful assistant")
FRAMES = (4, 2.0)  # frames of a video, and a second's


def qwen_picture(
    family: qwen_vl.QwenVLFamily, generator: torch.Generator, sample: int, image: int, images: int
) -> TinyPicture:
    """An image of 3 x 4 visual tokens and more, or a video of two such layers, between Qwen's marks."""
    video = bool((sample + image) % 2)
    layers, high, wide = 2 if video else 1, 3, 4 + sample + image
    side = family.model.config.vision_config.patch_size
    pixels = torch.randn(layers * 4 * high * wide, 3 * 2 * side * side, generator=generator)
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    start, end, of_image, of_video = map(family.tokenizer.convert_tokens_to_ids, names)
    visual = [of_video if video else of_image] * (high * wide)
    if video and family.name.startswith("qwen3_vl"):
        words = torch.randint(10, 60, (6,), generator=generator).tolist()
        visual = [*words[:3], start, *visual, end, *words[3:], start, *visual]
    else:
        visual = layers * visual
    seconds = 2 / FRAMES[1] if video else 0.0
    grid = [layers, 2 * high, 2 * wide]
    return TinyPicture(visual, pixels, grid, [start], [end], seconds if family.name == "qwen2_5_vl" else None)


GLM_SPECIAL = (
    *("<|endoftext|>", "<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|begin_of_video|>"),
    *("<|end_of_video|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "/nothink", "<think>", "</think>"),
)


def glm_family(seed: int = 0, kv_heads: int = 2, experts: bool = False) -> qwen_vl.Glm4vFamily:
    """Make three layers, channels half turned, a tower of four blocks; experts (four, one shared) but in the first."""
    torch.manual_seed(seed)
    tokenizer = qwen_tokenizer(GLM_SPECIAL, "<|user|>")
    marks = zip(("image_start", "image", "image_end", "video_start", "video_end"), GLM_SPECIAL[1:6], strict=True)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in marks}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    own = {"rope_parameters": rope, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = decoder_sizes(len(tokenizer), kv_heads, **own)
    if experts:
        text |= {"n_routed_experts" if name == "num_experts" else name: size for name, size in EXPERTS.items()}
        text |= {"head_dim": 16}
    kind = "Glm4vMoe" if experts else "Glm4v"
    model = _model(kind, text, {**BLOCKS, "image_size": 56}, ids)
    pictures = Glm4vImageProcessorPil(size={"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 28 * 28 * 1280})
    return getattr(qwen_vl, f"{kind}Family")(model, qwen_vl.GlmProcessor(pictures, tokenizer))


def glm_picture(
    family: qwen_vl.Glm4vFamily, generator: torch.Generator, sample: int, image: int, images: int
) -> TinyPicture:
    """An image between its marks, or a video whose two layers are such images with a word behind each."""
    video = bool((sample + image) % 2)
    layers, high, wide = 2 if video else 1, 3, 4 + sample + image
    pixels = torch.randn(layers * 4 * high * wide, 3 * 2 * 14 * 14, generator=generator)
    start, visual, end, opened, closed = map(family.tokenizer.convert_tokens_to_ids, GLM_SPECIAL[1:6])
    grid, run = [layers, 2 * high, 2 * wide], [visual] * (high * wide)
    if not video:
        return TinyPicture(run, pixels, grid, [start], [end])
    words = torch.randint(20, 60, (2,), generator=generator).tolist()
    return TinyPicture([*run, end, words[0], start, *run], pixels, grid, [opened, start], [end, words[1], closed])


FAMILIES = (
    TinyFamily("qwen2_5_vl", qwen_family, qwen_picture, order=1),
    TinyFamily("qwen2_vl", qwen2_family, qwen_picture, order=10),
    TinyFamily("qwen3_vl", qwen3_family, qwen_picture, order=11),
    TinyFamily("glm4v", glm_family, glm_picture, order=14),
    TinyFamily("glm4v_moe", partial(glm_family, experts=True), glm_picture, order=14, crossed=False),
    TinyFamily("qwen3_vl_moe", partial(qwen3_family, experts=True), qwen_picture, order=14, crossed=False),
)
