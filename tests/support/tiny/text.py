"""Language models of the shapes that the text family serves."""

from __future__ import annotations

from functools import partial

import torch

from subtoken_train.families.family import Family
from tests.support.text_families import WINDOWED, text_family
from tests.support.tiny import TinyFamily


def build(kind: str, seed: int) -> Family:
    """Its attention is less sharp than ``text_family`` makes it, which multiplies rounding errors."""
    family = text_family(kind, initializer_range=0.2, seed=seed)
    with torch.no_grad():
        for layer in family.decoder.layers:
            layer.self_attn.q_proj.weight.div_(8)
            layer.self_attn.k_proj.weight.div_(8)
    return family


KINDS = ("llama", "qwen2", "mistral", "qwen3", "llama31", "mistral_window", "qwen2_window")
FAMILIES = tuple(
    TinyFamily(kind, partial(build, kind, 3 + i), windowed=kind in WINDOWED, order=2) for i, kind in enumerate(KINDS)
)
