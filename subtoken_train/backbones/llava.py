"""LLaVA-1.5 (any size) in the transformers 5 format: CLIP tower, projector, Llama-like language model.

Legend: B batch, N positions, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subtoken_train.backbones.base import Family, RenderedPrompt, Turn
from subtoken_train.functional.images import pad_to_square
from subtoken_train.types import Batch


class LlavaFamily(Family):
    """``LlavaForConditionalGeneration`` behind the family interface."""

    name = "llava"
    # Anchored: the CLIP tower has q_proj and v_proj too.
    lora_pattern = r"model\.language_model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"

    @property
    def decoder(self) -> Any:
        """The Llama stack."""
        return self.model.model.language_model

    @property
    def image_token_id(self) -> int:
        """Id of the placeholder that stands once per visual token."""
        return int(self.model.config.image_token_id)

    def render(self, turns: Iterable[Turn]) -> RenderedPrompt:
        r"""LLaVA-1.5's format without system text: ``<s>USER: <image>\nquestion ASSISTANT: answer</s>USER: ...``.

        Image markers are moved to the front of their turn, as in LLaVA's own preprocessing.
        """
        marker, tokenizer = self.processor.image_token, self.tokenizer
        text, spans = tokenizer.bos_token or "", []
        for turn in turns:
            count = turn.prompt.count("<image>")
            words = turn.prompt.replace("<image>", "").strip()
            text += "USER: " + f"{marker}\n" * count + f"{words} ASSISTANT:"
            if turn.answer is not None:
                start = len(text)
                text += f" {turn.answer.strip()}{tokenizer.eos_token}"
                spans.append((start, len(text)))
        return RenderedPrompt(text, spans, marker)

    def visual_tokens(self, image_size: tuple[int, int] | None = None) -> int:
        """Patches of the tower's fixed resolution (CLS dropped by the ``default`` strategy)."""
        vision = self.model.config.vision_config
        cls_kept = self.model.config.vision_feature_select_strategy != "default"
        return int((vision.image_size // vision.patch_size) ** 2 + cls_kept)

    def process_images(self, images: list[Any]) -> Tensor:
        """Pixel values [num_images, 3, H, W]; images are padded to a square of the mean colour first."""
        image_processor = self.processor.image_processor
        fill = tuple(round(255 * mean) for mean in image_processor.image_mean)
        squares = [pad_to_square(image, fill) for image in images]
        pixels: Tensor = image_processor(squares, return_tensors="pt")["pixel_values"]
        return pixels

    @torch.no_grad()
    def embed(self, batch: Batch) -> Tensor:
        """Input embeddings [B, N, D]; image tokens hold the projected visual features."""
        embeds_BND: Tensor = self.model.get_input_embeddings()(batch.input_ids_BN)
        if batch.pixel_values is None:
            return embeds_BND
        pixels = batch.pixel_values.to(self.model.dtype)
        features = torch.cat(list(self.model.model.get_image_features(pixel_values=pixels).pooler_output))
        is_image = (batch.input_ids_BN == self.image_token_id)[..., None]
        if int(is_image.sum()) != len(features):
            raise ValueError(
                f"{int(is_image.sum())} image tokens but {len(features)} visual features in the batch of records "
                f"{', '.join(batch.record_ids)}"
            )
        return embeds_BND.masked_scatter(is_image, features.to(embeds_BND.dtype))

    def rotate(self, query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Llama's rotary embedding of [B, H, N, d] queries and keys."""
        rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(query, key, *position_embeddings)
        return rotated
