"""Qwen2.5-VL (3B, 7B) in the transformers 5 format: window-attention tower, mRoPE, images of any size. No videos.

Legend: B batch, N positions, D model width, H heads, I images, T visual tokens, C tower output width (= D here).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from subtoken_train.families.family import Family, GivenImages
from subtoken_train.families.images import FP32_BYTES, copied_bytes
from subtoken_train.families.qwen_processor import QwenProcessor
from subtoken_train.families.qwen_tower import tower_with_statistics
from subtoken_train.types import APACHE, Batch, Licence, Region, RenderedPrompt, TowerStatistics, Turn, VisualStates

DEFAULT_MAX_PIXELS = 1280 * 28 * 28
"""Cap of an image, in pixels: 1,280 visual tokens. Published checkpoints allow 16,384, more than a training record."""
_HUB = "https://huggingface.co/Qwen"
_MAX_ASPECT = 200
"""Longer side / shorter side that Qwen's resizing accepts."""


class Qwen25VLFamily(Family):
    """``Qwen2_5_VLForConditionalGeneration`` behind the family interface.

    Positions are mRoPE ids, made for every batch from its own image tokens and grids: nothing is kept in the model
    between calls.
    """

    name = "qwen2_5_vl"
    auto_processor = QwenProcessor
    lora_pattern = r"model\.language_model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"
    published: ClassVar[dict[str, Callable[[], Any]]] = {
        "Qwen/Qwen2.5-VL-3B-Instruct": lambda: _published(2048, 11008, 36, 16, 2, 151936, True),
        "Qwen/Qwen2.5-VL-7B-Instruct": lambda: _published(3584, 18944, 28, 28, 4, 152064, False),
    }
    licences: ClassVar[dict[str, Licence]] = {
        "Qwen/Qwen2.5-VL-3B-Instruct": Licence(
            "other", "qwen-research", f"{_HUB}/Qwen2.5-VL-3B-Instruct/blob/main/LICENSE"
        ),
        "Qwen/Qwen2.5-VL-7B-Instruct": APACHE,
    }
    unquantised: ClassVar[tuple[str, ...]] = ("lm_head", "model.visual")
    image_inputs: ClassVar[tuple[str, ...]] = ("pixel_values", "image_grid_thw", "mm_token_type_ids")
    tower_positions = "mrope"
    # 171 = 27 + 144: a 336 x 336 image; this chat format makes 27 of a six-token question, 15 of them before the image
    nominal_image = (336, 336)
    paper_text: ClassVar[dict[str, int]] = {"system": 15, "query": 12}

    def __init__(self, model: Any, processor: Any) -> None:
        super().__init__(model, processor)
        size = (Qwen2VLImageProcessorPil if processor is None else processor.image_processor).size
        self.min_pixels = int(size["shortest_edge"])
        self.max_pixels = min(int(size["longest_edge"]), DEFAULT_MAX_PIXELS)

    def limit_pixels(self, max_pixels: int) -> None:
        """Scale images of more than ``max_pixels`` down (aspect ratio kept), instead of the default cap.

        Raises:
            ValueError: below the size that small images are scaled up to.
        """
        if max_pixels < self.min_pixels:
            raise ValueError(
                f"max_pixels={max_pixels} is below {self.min_pixels}, the pixels that small images are scaled up to"
            )
        self.max_pixels = max_pixels

    def render(self, turns: Iterable[Turn]) -> RenderedPrompt:
        r"""Qwen's ChatML with its default system text; images stand where the prompt has them.

        ``<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|>
        <|vision_end|>question<|im_end|>\n<|im_start|>assistant\nanswer<|im_end|>\n``, in one piece. White space beside
        an image is dropped. An answer's span ends with its ``<|im_end|>``; the newline after it carries no loss.
        """
        marker = self.processor.image_token
        picture = f"<|vision_start|>{marker}<|vision_end|>"
        text, spans = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", []
        for turn in turns:
            words = picture.join(part.strip() for part in turn.prompt.split("<image>"))
            text += f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
            if turn.answer is not None:
                start = len(text)
                text += f"{turn.answer.strip()}<|im_end|>"
                spans.append((start, len(text)))
                text += "\n"
        return RenderedPrompt(text, spans, marker)

    def visual_tokens(self, image_size: tuple[int, int] | None = None, together: int = 1) -> int:
        """Merged patches of one image of (height, width) pixels after resizing; the nominal image without a size.

        Raises:
            ValueError: the image is too long for its width, or too wide for its height.
        """
        height, width = image_size or self.nominal_image
        if max(height, width) > _MAX_ASPECT * min(height, width):
            raise ValueError(
                f"an image of {height} x {width} pixels: Qwen2.5-VL takes a longer side of at most {_MAX_ASPECT} times "
                "the shorter one; crop it or drop the record"
            )
        vision = self.model.config.vision_config
        unit = vision.patch_size * vision.spatial_merge_size
        high, wide = smart_resize(height, width, unit, self.min_pixels, self.max_pixels)
        return int(high * wide // unit**2)

    def process_images(self, images: list[Any], together: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Flattened patches of all images, [num_patches, channels * pixels], and (1, height, width) of each grid."""
        size = {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}
        made = self.processor.image_processor(images, size=size, return_tensors="pt")
        return made["pixel_values"], made["image_grid_thw"]

    def read_images(self, given: Mapping[str, Tensor], visual_BN: Tensor) -> GivenImages:
        """Flattened patches and the grids that count them."""
        pixels, grid = given.get("pixel_values"), given.get("image_grid_thw")
        if pixels is not None or grid is not None:
            patches = -1
            if grid is not None and grid.dim() == 2 and grid.shape[1] == 3 and not grid.is_floating_point():
                patches = int(grid.prod(-1).sum())
            if pixels is None or pixels.dim() != 2 or len(pixels) != patches:
                raise ValueError(
                    f"pixel_values of {self.name} must be [patches, channels] with image_grid_thw [images, 3] that "
                    "counts the patches; pass the processor's whole output"
                )
        runs = [sum(image for image, _ in groupby(row)) for row in visual_BN.tolist()]
        return GivenImages(pixels, grid, torch.tensor(runs, device=visual_BN.device))

    def given_images(self, pixels: Tensor, grid_I3: Tensor | None, input_ids_BN: Tensor) -> dict[str, Tensor]:
        """By the names of Qwen's processor."""
        assert grid_I3 is not None
        kinds = self.is_visual(input_ids_BN).int()
        return {"pixel_values": pixels, "image_grid_thw": grid_I3, "mm_token_type_ids": kinds}

    def image_bytes(self) -> int:
        """Bytes of the nominal image's flattened patches, fp32."""
        merged = self.model.config.vision_config.spatial_merge_size**2
        return int(self.visual_tokens() * merged * self._patch_bytes())

    def tower_bytes(self, pixel_bytes: int) -> int:
        """Most that is live at once, with patches of C channels.

        The blocks turn queries and keys in fp32: the two copies, the turned query, and three products of the key, 4 C
        each, beside query, key and value, the residual and the norm's output; and the pixels (fp32 in ``pixel_bytes``)
        in the tower's own dtype.
        """
        patches, element = pixel_bytes // self._patch_bytes(), self.shape.element_bytes
        channels = patches * self.model.config.vision_config.hidden_size
        return int(copied_bytes(pixel_bytes, element) + channels * (6 * FP32_BYTES + 5 * element))

    def positions(self, batch: Batch) -> Tensor:
        """MRoPE ids [3, B, N] (time, height, width), whatever the padding side; 0 at padding.

        Raises:
            ValueError: the runs of image tokens are not the images' sizes, in order.
        """
        ids_BN, visible_BN = batch.input_ids_BN.cpu(), (batch.regions_BN != Region.PADDING).cpu()
        is_image_BN = (ids_BN == self.image_token_id) & visible_BN
        grid_I3 = None if batch.image_grid_I3 is None else batch.image_grid_I3.cpu()
        sizes = [] if grid_I3 is None else self._token_counts(grid_I3)
        runs = [len(list(run)) for row in is_image_BN.tolist() for image, run in groupby(row) if image]
        if runs != sizes:
            raise ValueError(
                f"images of {sizes} visual tokens but runs of {runs} image tokens in the batch of records "
                f"{', '.join(batch.record_ids)}"
            )
        position_3BN, _ = self.model.model.get_rope_index(
            ids_BN, mm_token_type_ids=is_image_BN.int(), image_grid_thw=grid_I3, attention_mask=visible_BN
        )
        on_device: Tensor = position_3BN.to(batch.input_ids_BN.device)
        return on_device

    @torch.no_grad()
    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates | None:
        """The tower's merged embeddings, in raster order; statistics are those of its last block (see ``qwen_tower``).

        There is no class token.
        """
        if batch.pixel_values is None:
            return None
        assert batch.image_grid_I3 is not None
        tower, grid_I3 = self.model.model.visual, batch.image_grid_I3
        patches, sizes = batch.pixel_values.to(tower.dtype), self._token_counts(grid_I3)
        if statistics is None:
            return VisualStates(list(torch.split(tower(patches, grid_thw=grid_I3).pooler_output, sizes)))
        tokens, received, keys = (
            list(torch.split(part, sizes)) for part in tower_with_statistics(tower, patches, grid_I3)
        )
        return VisualStates(tokens, None, received, keys)

    def project(self, states_TC: Tensor) -> Tensor:
        """Nothing to do: the tower ends in the language model's width."""
        return states_TC

    def _patch_bytes(self) -> int:
        """A patch of flattened pixels, fp32."""
        vision = self.model.config.vision_config
        return int(FP32_BYTES * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)

    def _token_counts(self, grid_I3: Tensor) -> list[int]:
        """Visual tokens of each image."""
        counts: list[int] = (grid_I3.prod(-1) // self.model.config.vision_config.spatial_merge_size**2).tolist()
        return counts


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
