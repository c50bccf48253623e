"""LLaVA-1.5 (any size) in the transformers 5 format: CLIP tower, projector, Llama-like language model.

Legend: B batch, N positions (of the tower: class token first), D model width, I images, T visual tokens, C tower width,
H heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPVisionConfig, LlavaConfig

from subtoken_train.families.chat import LlavaChat
from subtoken_train.families.family import Family
from subtoken_train.families.images import FP32_BYTES, check_square, copied_bytes, mean_colour, pad_to_square
from subtoken_train.families.text import llama_config
from subtoken_train.families.towers import class_attention
from subtoken_train.types import APACHE, Batch, Licence, RenderedPrompt, TowerStatistics, Turn, VisualStates


class LlavaFamily(Family):
    """``LlavaForConditionalGeneration`` behind the family interface."""

    name = "llava"
    # Anchored: the CLIP tower has q_proj and v_proj too.
    lora_pattern = r"model\.language_model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"
    unquantised: ClassVar[tuple[str, ...]] = ("lm_head", "model.vision_tower", "model.multi_modal_projector")
    published: ClassVar[dict[str, Callable[[], Any]]] = {
        "llava-hf/llava-1.5-7b-hf": lambda: _published(4096, 11008, 32, 32),
        "llava-hf/llava-1.5-13b-hf": lambda: _published(5120, 13824, 40, 40),
    }
    licences: ClassVar[dict[str, Licence]] = {
        "llava-hf/llava-1.5-7b-hf": Licence("llama2"),
        "llava-hf/llava-1.5-13b-hf": Licence("llama2"),
        "checkpoints/tiny-llava": APACHE,
    }
    # 595 = 576 + 19; how the 19 split is our reading. The system text cannot be among them: with it 35 tokens stand
    # before the image (FitPrune and SparseVLM hard-code that), without it 5 (as FastV's demo does).
    paper_text: ClassVar[dict[str, int]] = {"system": 5, "query": 14}
    chooses_chat = True
    chat = LlavaChat()

    def render(self, turns: Iterable[Turn]) -> RenderedPrompt:
        """Write the conversation in one of LLaVA's modes, see ``chat``."""
        tokenizer = self.tokenizer
        return self.chat.render(list(turns), self.processor.image_token, tokenizer.bos_token or "", tokenizer.eos_token)

    def choose_chat(self, template: str | None, system: str | None) -> None:
        """Take one of ``llava_chat.TEMPLATES``, and whether ``vicuna_v1`` has its system text."""
        self.chat = LlavaChat(template or LlavaChat.template, system or LlavaChat.system)

    @property
    def nominal_text(self) -> dict[str, int]:
        if self.chat.template == "plain":
            return {"system": 1, "query": 10}
        return {**self.paper_text, "system": 35 if self.chat.system_text else 5}

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        """Count the patches of the tower's fixed resolution (CLS dropped by the ``default`` strategy)."""
        if image_size is not None:
            check_square(*image_size)
        vision = self.model.config.vision_config
        cls_kept = self.model.config.vision_feature_select_strategy != "default"
        return int((vision.image_size // vision.patch_size) ** 2 + cls_kept)

    def framed(self, image: Image.Image) -> Image.Image:
        """Return an image on a square of the processor's mean colour."""
        return pad_to_square(image, mean_colour(self.processor.image_processor))

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, Tensor | None]:
        """Return pixel values [num_images, 3, H, W]; images are first padded to a square of the mean colour."""
        image_processor = self.processor.image_processor
        squares = [self.framed(image) for image in images]
        return image_processor(squares, return_tensors="pt")["pixel_values"], None

    def image_bytes(self) -> int:
        """Return the bytes of the square image that the tower takes, fp32."""
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

    def project(self, states_TC: Tensor) -> Tensor:
        """Apply the multi-modal projector."""
        features: Tensor = self.model.model.multi_modal_projector(states_TC)
        return features


def _published(width: int, mlp: int, layers: int, heads: int) -> LlavaConfig:
    vision = CLIPVisionConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        image_size=336,
        patch_size=14,
        projection_dim=768,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=llama_config(32064, width, mlp, layers, heads),
        image_token_index=32000,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
