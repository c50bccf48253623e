"""Random tiny models of every family with weights large enough that a wrong mask shows, and prompts for them."""

from __future__ import annotations

from functools import cache

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from checkpoints.tiny_llava import build_processor
from subtoken_train.families.family import Family
from subtoken_train.families.llava import LlavaFamily
from subtoken_train.types import Batch, Region
from tests.support.qwen_tiny import qwen_family
from tests.support.text_families import text_family

FAMILIES = ["llava", "llava_gqa", "qwen2_5_vl", "llama", "qwen2", "mistral"]
SAMPLES = {
    "one": [(1, 6)],
    "three": [(1, 6), (2, 9), (1, 4)],
    "text": [(1, 6), (0, 7), (2, 9)],
    "last": [(1, 0), (2, 5), (2, 0)],
}
"""Per sample (images, text tokens after them); language models read (contexts, query tokens). In ``last``
two prompts end with their image."""
CONTEXT = 24  # context tokens that stand for an image in a language model's prompt


def _llava(kv_heads: int) -> LlavaFamily:
    """Three layers of four heads of width 16; 16 visual tokens an image."""
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=96,
        patch_size=24,
        projection_dim=32,
    )
    text = LlamaConfig(
        vocab_size=90,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=4, vision_feature_layer=-1)
    return LlavaFamily(LlavaForConditionalGeneration(config).eval(), build_processor())


@cache
def family_of(name: str, dtype: torch.dtype = torch.float32) -> Family:
    """A family by its name; made once."""
    if name == "llava":
        family: Family = _llava(4)
    elif name == "llava_gqa":
        family = _llava(2)
    elif name == "qwen2_5_vl":
        family = qwen_family()
    else:
        family = text_family(name, initializer_range=0.2, seed=FAMILIES.index(name))
        with torch.no_grad():  # so sharp an attention multiplies rounding errors
            for layer in family.decoder.layers:
                layer.self_attn.q_proj.weight.div_(8)
                layer.self_attn.k_proj.weight.div_(8)
    family.model.to(dtype)
    return family


def prompts(family: Family, kind: str, pad_left: bool, seed: int = 0) -> Batch:
    """Prompts without answers, see ``SAMPLES``; the tokens are at random."""
    generator = torch.Generator().manual_seed(seed)
    rows, codes, grids, pixels = [], [], [], []
    for sample, (images, text) in enumerate(SAMPLES[kind]):
        regions = [Region.SYSTEM] * 2
        marks: list[int] = []
        for image in range(images):
            if family.image_token_id is None:
                span, head = CONTEXT + 9 * sample, []
                body = [Region.CONTEXT] * span
            elif family.name == "llava":
                span, head = 16, []
                body = [Region.VISUAL] * span
                pixels.append(torch.randn(1, 3, 96, 96, generator=generator))
            else:
                high, wide = (3, 4 + sample + image)
                span, head = high * wide, [Region.SYSTEM] if not image else [Region.QUERY]
                body = [Region.VISUAL] * span
                grids.append([1, 2 * high, 2 * wide])
                pixels.append(torch.randn(4 * span, 1176, generator=generator))
            marks += range(len(regions) + len(head), len(regions) + len(head) + span)
            regions += head + body
        if images and grids and text:
            regions.append(Region.QUERY)
        regions += [Region.QUERY] * text
        ids = torch.randint(10, 60, (len(regions),), generator=generator)
        if family.image_token_id is not None:
            ids[marks] = family.image_token_id
            if grids:
                ids = _vision_marks(family, ids, marks)
        rows.append(ids)
        codes.append(torch.tensor(regions))
    return _padded(family, rows, codes, [n for n, _ in SAMPLES[kind]], pixels, grids, pad_left)


def _vision_marks(family: Family, ids: torch.Tensor, marks: list[int]) -> torch.Tensor:
    """Qwen's tokens around every run of image tokens."""
    start, end = (family.tokenizer.convert_tokens_to_ids(f"<|vision_{x}|>") for x in ("start", "end"))
    for mark in marks:
        if mark - 1 not in marks:
            ids[mark - 1] = start
        if mark + 1 not in marks and mark + 1 < len(ids):
            ids[mark + 1] = end
    return ids


def _padded(family, rows, codes, images, pixels, grids, pad_left: bool) -> Batch:
    width, count = max(map(len, rows)), len(rows)
    ids = torch.full((count, width), family.tokenizer.pad_token_id)
    regions = torch.zeros(count, width, dtype=torch.long)
    ranks = []
    for i, (row, code) in enumerate(zip(rows, codes, strict=True)):
        start = width - len(row) if pad_left else 0
        ids[i, start : start + len(row)], regions[i, start : start + len(row)] = row, code
        ranks.append(start + len(row) - 1 if images[i] or family.image_token_id is None else -1)
    sees = family.image_token_id is not None
    return Batch(
        ids,
        torch.full_like(ids, -100),
        regions,
        torch.tensor(ranks),
        torch.cat(pixels) if pixels else None,
        torch.tensor(images if sees else [0] * count),
        [f"sample-{i}" for i in range(count)],
        torch.tensor(grids) if grids else None,
    )
