"""Qwen2.5-VL (3B, 7B) in the transformers 5 format: a tower with windows, mRoPE whose time counts seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig

from subtoken_train.families.images import Picture, Video
from subtoken_train.families.qwen_pictures import VIDEO
from subtoken_train.families.qwen_vl import HUB, QwenVLFamily
from subtoken_train.types import APACHE, Licence


class Qwen25VLFamily(QwenVLFamily):
    """``Qwen2_5_VLForConditionalGeneration`` behind the family interface."""

    name = "qwen2_5_vl"
    title = "Qwen2.5-VL"
    published: ClassVar[dict[str, Callable[[], Any]]] = {
        "Qwen/Qwen2.5-VL-3B-Instruct": lambda: _published(2048, 11008, 36, 16, 2, 151936, True),
        "Qwen/Qwen2.5-VL-7B-Instruct": lambda: _published(3584, 18944, 28, 28, 4, 152064, False),
    }
    licences: ClassVar[dict[str, Licence]] = {
        "Qwen/Qwen2.5-VL-3B-Instruct": Licence(
            "other", "qwen-research", f"{HUB}/Qwen2.5-VL-3B-Instruct/blob/main/LICENSE"
        ),
        "Qwen/Qwen2.5-VL-7B-Instruct": APACHE,
    }
    image_inputs: ClassVar[tuple[str, ...]] = (*QwenVLFamily.image_inputs, "second_per_grid_ts")
    # 171 = 27 + 144: a 336 x 336 image; this chat format makes 27 of a six-token question, 15 of them before the image
    paper_text: ClassVar[dict[str, int]] = {"system": 15, "query": 12}

    def seconds(self, pictures: Sequence[Picture]) -> Tensor | None:
        """Seconds of a video's layer; None where there is no video."""
        depth = self.vision.temporal_patch_size
        found = [depth / picture.fps if isinstance(picture, Video) else 0.0 for picture in pictures]
        return torch.tensor(found) if any(found) else None

    def read_seconds(self, given: Mapping[str, Tensor], kinds: list[int]) -> Tensor | None:
        """From ``second_per_grid_ts``, of the videos alone; a second where it was not given, as transformers reads it.

        Raises:
            ValueError: there are more or fewer of them than videos.
        """
        videos, given_V = kinds.count(VIDEO), given.get("second_per_grid_ts")
        if given_V is not None and given_V.numel() != videos:
            raise ValueError(
                f"second_per_grid_ts has {given_V.numel()} values for {videos} videos; pass the processor's whole "
                "output"
            )
        if not videos:
            return None
        seconds_V = iter([1.0] * videos if given_V is None else given_V.flatten().tolist())
        return torch.tensor([next(seconds_V) if kind == VIDEO else 0.0 for kind in kinds])

    def block_bytes(self, element: int) -> int:
        """An attention's."""
        return self.attention_bytes(self.vision.hidden_size, element)


def _published(
    width: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> Qwen2_5_VLConfig:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {"hidden_size": 1280, "out_hidden_size": width, "tokens_per_second": 2}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)
