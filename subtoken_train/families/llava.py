"""LLaVA-1.5 (any size) in the transformers 5 format: CLIP tower, projector, Llama-like language model.

Legend: B batch, N positions (of the tower: class token first), D model width, I images, T visual tokens, C tower width,
H heads, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor

from subtoken_train.families.chat import llava_chat
from subtoken_train.families.family import Family, published_of
from subtoken_train.families.images import FP32_BYTES, check_square, copied_bytes, mean_colour, pad_to_square
from subtoken_train.families.towers import class_attention
from subtoken_train.types import APACHE, Batch, TowerStatistics, VisualStates


class LlavaFamily(Family):
    """``LlavaForConditionalGeneration`` behind the family interface."""

    name = "llava"
    published, licences = published_of("llava")
    licences["checkpoints/tiny-llava"] = APACHE
    # 595 = 576 + 19; how the 19 split is our reading. The system text cannot be among them: with it 35 tokens stand
    # before the image (FitPrune and SparseVLM hard-code that), without it 5 (as FastV's demo does).
    paper_text = {"system": 5, "query": 14}  # noqa: RUF012
    chooses_chat = True
    chat = llava_chat()

    def choose_chat(self, template: str | None, system: str | None) -> None:
        self.chat = llava_chat(template, system)

    @property
    def nominal_text(self) -> dict[str, int]:
        return self.chat.tokens or self.paper_text

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        """Count the patches of the tower's fixed resolution (CLS dropped by the ``default`` strategy)."""
        if image_size is not None:
            check_square(*image_size)
        vision = self.model.config.vision_config
        cls_kept = self.model.config.vision_feature_select_strategy != "default"
        return int((vision.image_size // vision.patch_size) ** 2 + cls_kept)

    def framed(self, image: Image.Image) -> Image.Image:
        return pad_to_square(image, mean_colour(self.processor.image_processor))

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, Tensor | None]:
        squares = [self.framed(image) for image in images]
        return self.processor.image_processor(squares, return_tensors="pt")["pixel_values"], None

    def image_bytes(self) -> int:
        return int(FP32_BYTES * 3 * self.model.config.vision_config.image_size**2)

    def tower_bytes(self, pixel_bytes: int) -> int:
        """Return the peak bytes for images, or tiles, of P patches, with C channels and an MLP of I.

        CLIP returns every layer's hidden states, e C each; at work is an MLP: its input to the quick GELU, the sigmoid
        and their product, e I each; beside them the pixels (fp32 in ``pixel_bytes``) in the tower's own dtype.
        """
        vision, element = self.model.config.vision_config, self.shape.element_bytes
        images = pixel_bytes // (FP32_BYTES * 3 * vision.image_size**2)
        patches = images * ((vision.image_size // vision.patch_size) ** 2 + 1)
        states = (vision.num_hidden_layers + 1) * vision.hidden_size
        return int(copied_bytes(pixel_bytes, element) + patches * element * (states + 3 * vision.intermediate_size))

    @classmethod
    def tower_statistics(cls, config: Any) -> frozenset[TowerStatistics]:
        """Return all kinds if the class token is no visual token itself, else none."""
        drops_cls = config.vision_feature_select_strategy == "default"
        return frozenset({"received", "class", "unsplit"} if drops_cls else ())

    @torch.no_grad()
    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates | None:
        """Return CLIP's hidden states of ``vision_feature_layer``; statistics are from the layer that made them.

        ``unsplit`` ones are the last layer's, whose output LLaVA does not use.
        """
        if batch.pixel_values is None:
            return None
        config, tower = self.model.config, self.model.model.vision_tower
        states = tower(batch.pixel_values.to(self.model.dtype), output_hidden_states=True).hidden_states
        chosen = config.vision_feature_layer
        indices = [index % len(states) for index in ([chosen] if isinstance(chosen, int) else chosen)]
        hidden_INC = torch.cat([states[index] for index in indices], dim=-1)
        has_cls = config.vision_feature_select_strategy == "default"
        tokens_ITC = hidden_INC[:, 1:] if has_cls else hidden_INC
        if statistics is None:
            return VisualStates(list(tokens_ITC))
        if not has_cls or indices[-1] == 0:
            raise ValueError(
                "a reducer in the tower needs a CLIP tower whose class token is dropped "
                "(vision_feature_select_strategy: default) and a vision_feature_layer past the embeddings; this "
                f"backbone has {chosen}, {config.vision_feature_select_strategy!r}"
            )
        whole = statistics == "unsplit"
        number = len(tower.encoder.layers) - 1 if whole else indices[-1] - 1
        layer = tower.encoder.layers[number]
        normed_INC = layer.layer_norm1(states[number])
        received_IT, keys_ITd = class_attention(layer.self_attn, normed_INC, 1 if whole else None)
        return VisualStates(list(tokens_ITC), list(hidden_INC[:, 0]), list(received_IT), list(keys_ITd))
