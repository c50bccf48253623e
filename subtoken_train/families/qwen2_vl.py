"""Qwen2-VL (2B, 7B) in the transformers 5 format: every block of its tower sees a whole frame; time counts layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from transformers import Qwen2VLConfig

from subtoken_train.families.qwen_vl import QwenVLFamily
from subtoken_train.types import APACHE, Licence


class Qwen2VLFamily(QwenVLFamily):
    """``Qwen2VLForConditionalGeneration`` behind the family interface."""

    name = "qwen2_vl"
    title = "Qwen2-VL"
    published: ClassVar[dict[str, Callable[[], Any]]] = {
        "Qwen/Qwen2-VL-2B-Instruct": lambda: _published(1536, 8960, 28, 12, 2, 151936, True),
        "Qwen/Qwen2-VL-7B-Instruct": lambda: _published(3584, 18944, 28, 28, 4, 152064, False),
    }
    licences: ClassVar[dict[str, Licence]] = {"Qwen/Qwen2-VL-2B-Instruct": APACHE, "Qwen/Qwen2-VL-7B-Instruct": APACHE}
    # as Qwen2.5-VL's, whose chat format it has
    paper_text: ClassVar[dict[str, int]] = {"system": 15, "query": 12}

    def block_bytes(self, element: int) -> int:
        """An attention's, or an MLP's: residual, norm, and three of ``mlp_ratio`` C around the quick GELU."""
        channels, ratio = self.vision.embed_dim, self.vision.mlp_ratio
        return int(max(self.attention_bytes(channels, element), channels * element * (2 + 3 * ratio)))


def _published(
    width: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> Qwen2VLConfig:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    return Qwen2VLConfig(text_config=text, vision_config={"hidden_size": width}, tie_word_embeddings=tied)
