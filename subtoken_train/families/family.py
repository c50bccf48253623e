"""What every backbone family provides; one file per family implements it.

Legend: B batch, N positions, D model width, V vocabulary, H query heads, d head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, Cache
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from subtoken_train.families.backbone_files import check_full_attention
from subtoken_train.functional.gather import count_positions
from subtoken_train.functional.quantized import dense_weight, is_readable
from subtoken_train.functional.rotary import Rotation
from subtoken_train.ledger.kv_budget import KVShape
from subtoken_train.reducers.base import PositionPolicy
from subtoken_train.types import Batch, Region, RenderedPrompt, Turn, VisualStates


class Family(ABC):
    """A loaded Hugging Face model behind the interface that reducers, routers and training use.

    Subclasses say where its parts are. The loop over decoder layers lives here: one code for training and inference.
    """

    name: str
    published: ClassVar[dict[str, Callable[[], Any]]] = {}
    """Hub ids whose configuration is known here, for checks without network; each is made when it is called."""
    lora_pattern: str
    """Modules of the q/v LoRA, anchored to the language model; it ends in ``(q_proj|v_proj)``."""
    sees_images: ClassVar[bool] = True
    """False for a language model."""
    unquantised: ClassVar[tuple[str, ...]] = ("lm_head",)
    """Modules that quantisation leaves alone: all outside the decoder."""
    auto_model: Any = AutoModelForImageTextToText
    auto_processor: Any = AutoProcessor
    tower_positions: PositionPolicy = "renumber"
    """Position ids of what a tower reducer leaves: counted anew, or (mRoPE) each row's own."""
    nominal_image: tuple[int, int] | None = None
    """(height, width) in pixels that figures without an image are about; None where all images give as many tokens."""
    paper_text: ClassVar[dict[str, int]]
    """Text tokens beside the image in the paper's prompt (Table 8), by region."""

    def __init__(self, model: Any, processor: Any) -> None:
        check_full_attention(model.config)
        self.model = model
        self.processor = processor

    @property
    def output_pattern(self) -> str:
        """Modules of the LoRA on the output projection: ``lora_pattern`` with ``o_proj`` in the place of q and v."""
        pattern = self.lora_pattern.replace("(q_proj|v_proj)", "o_proj")
        assert pattern != self.lora_pattern
        return pattern

    @property
    def decoder(self) -> Any:
        """The language model's stack: has ``layers``, ``norm``, ``rotary_emb``, ``config``."""
        return self.model.model.language_model

    @property
    def image_token_id(self) -> int | None:
        """Id of the placeholder that stands once per visual token; None for a text-only family."""
        return int(self.model.config.image_token_id) if self.sees_images else None

    @abstractmethod
    def render(self, turns: Iterable[Turn]) -> RenderedPrompt:
        """Write a conversation in the model's chat format, with the spans of its answers."""

    @abstractmethod
    def visual_tokens(self, image_size: tuple[int, int] | None = None) -> int:
        """Visual tokens of one image of (height, width) pixels, by default of ``nominal_image``.

        A fixed-resolution family ignores the size.
        """

    @abstractmethod
    def process_images(self, images: list[Any]) -> tuple[Tensor, Tensor | None]:
        """PIL images to (pixel values, grid of patches per image or None), sized as the tower wants them."""

    @abstractmethod
    def visual_states(self, batch: Batch, statistics: bool = False) -> VisualStates | None:
        """The tower's output for every image, without gradient; None for a batch without images.

        ``statistics``: also what VisionZip reads, the attention received and the keys.
        """

    @abstractmethod
    def project(self, states_TC: Tensor) -> Tensor:
        """The tower's output as the language model reads it, [T, D]."""

    def rotate(self, query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Llama's rotary embedding of [B, H, N, d] queries and keys; under mRoPE cos and sin hold all three axes."""
        rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(query, key, *position_embeddings)
        return rotated

    @torch.no_grad()
    def rotation(self, position_ids: Tensor) -> Rotation:
        """What turns queries and keys at position ids [B, N], or [3, B, N] under mRoPE."""
        like = torch.empty((), dtype=torch.float32, device=position_ids.device)
        cos, sin = self.decoder.rotary_emb(like, position_ids)
        batch = position_ids.shape[-2]
        return Rotation(cos.expand(batch, -1, -1), sin.expand(batch, -1, -1))

    @torch.no_grad()
    def output_weight(self, layer: int) -> Tensor:
        """Weight of a layer's ``o_proj`` with any LoRA on it, dequantised, [D, H * d] in fp32.

        Raises:
            ValueError: a weight that is quantised by other means than ``nf4`` and ``int8``.
        """
        projection = self.decoder.layers[layer].self_attn.o_proj
        base = getattr(projection, "base_layer", projection)
        if not is_readable(base):
            raise ValueError("o_proj is quantised by other means than nf4 and int8; take another eviction")
        weight = dense_weight(base, torch.float32)
        for adapter in getattr(projection, "active_adapters", ()):
            if adapter in projection.lora_A:
                weight = weight + projection.get_delta_weight(adapter).to(weight)
        return weight

    def image_bytes(self) -> int:
        """Bytes of one nominal image as a batch holds it (fp32); 0 for a language model."""
        return 0

    def tower_bytes(self, pixel_bytes: int) -> int:
        """Most that is live at once in the tower's pass over images of ``pixel_bytes``; 0 for a language model."""
        return 0

    def limit_pixels(self, max_pixels: int) -> None:
        """Cap the pixels of an image.

        Raises:
            ValueError: the family has one image size, or the cap is too small.
        """
        raise ValueError(f"max_pixels={max_pixels}: {self.name} scales every image to one size; remove max_pixels")

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer (the processor itself for text-only families)."""
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def shape(self) -> KVShape:
        """Cache geometry in the model's dtype."""
        config = self.decoder.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        element = torch.empty((), dtype=self.model.dtype).element_size()
        return KVShape(config.num_hidden_layers, config.num_key_value_heads, head_dim, element)

    @property
    def hidden_size(self) -> int:
        """D, the width that routers read."""
        return int(self.decoder.config.hidden_size)

    def positions(self, batch: Batch) -> Tensor:
        """Position ids of the unreduced batch: [B, N], counting real tokens only; [3, B, N] for an mRoPE family."""
        return count_positions(batch.regions_BN != Region.PADDING)

    @torch.no_grad()
    def embed(self, batch: Batch) -> Tensor:
        """Input embeddings [B, N, D] with the visual features in place."""
        states = self.visual_states(batch)
        return self.place(batch, None if states is None else self.project(torch.cat(states.tokens)))

    @torch.no_grad()
    def place(self, batch: Batch, features_TD: Tensor | None, keep_BN: Tensor | None = None) -> Tensor:
        """Input embeddings [B, N, D] whose image tokens (of ``keep_BN``, if given) hold ``features``, in order.

        Raises:
            ValueError: the tower made more or fewer features than there are image tokens.
        """
        embeds_BND: Tensor = self.model.get_input_embeddings()(batch.input_ids_BN)
        if features_TD is None:
            return embeds_BND
        assert self.image_token_id is not None
        is_image = batch.input_ids_BN.eq(self.image_token_id)
        if keep_BN is not None:
            is_image = is_image & keep_BN
        batch.check_features(int(is_image.sum()), len(features_TD))
        return embeds_BND.masked_scatter(is_image[..., None], features_TD.to(embeds_BND.dtype))

    def run_layers(
        self,
        hidden_BND: Tensor,
        attention_mask_BN: Tensor,
        position_ids: Tensor,
        cache: Cache | None = None,
        start: int = 0,
        stop: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Decoder layers ``start`` to ``stop`` (exclusive), without the final norm.

        The padding mask is always passed: without one, transformers takes jumps in the position ids (of shortened
        inputs) for packed sequences and silently cuts the attention between the pieces.
        ``position_ids`` are [B, N], or [3, B, N] under mRoPE; ``options`` reach every layer's attention function.
        """
        decoder = self.decoder
        mask = create_causal_mask(
            config=decoder.config,
            inputs_embeds=hidden_BND,
            attention_mask=attention_mask_BN,
            past_key_values=cache,
            position_ids=_text_positions(position_ids),
            layer_idx=start,
        )
        return self.through(decoder.layers[start:stop], hidden_BND, mask, position_ids, cache, **options)

    def decode(self, hidden_BqD: Tensor, position_ids: Tensor, cache: Cache) -> Tensor:
        """All decoder layers on new tokens after a packed prompt, without the final norm.

        No mask is made: packed storage holds no padding, and new tokens see each other causally. ``position_ids`` are
        [B, q], or [3, B, q] under mRoPE.
        """
        return self.through(self.decoder.layers, hidden_BqD, None, position_ids, cache)

    def through(
        self, layers: Any, hidden: Tensor, mask: Any, position_ids: Tensor, cache: Cache | None, **options: Any
    ) -> Tensor:
        """Some decoder layers, one after another, under a mask as transformers makes it."""
        position_embeddings = self.decoder.rotary_emb(hidden, position_ids)
        for layer in layers:
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_ids=_text_positions(position_ids),
                past_key_values=cache,
                use_cache=cache is not None,
                position_embeddings=position_embeddings,
                **options,
            )
        return hidden

    def logits(self, hidden_BND: Tensor) -> Tensor:
        """Final norm and language-model head, [B, N, V]."""
        logits: Tensor = self.model.get_output_embeddings()(self.decoder.norm(hidden_BND))
        return logits


def _text_positions(position_ids: Tensor) -> Tensor | None:
    """Position ids as transformers' layers take them; None under mRoPE."""
    return position_ids if position_ids.dim() == 2 else None
