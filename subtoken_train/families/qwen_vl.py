"""What Qwen2-VL, Qwen2.5-VL and Qwen3-VL share beside their pictures (``qwen_inputs``): chat format, tower, memory.

Legend: B batch, N positions, D model width, T visual tokens, C tower output width (= D here), n layers that are given
features of their own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.families.images import FP32_BYTES, copied_bytes
from subtoken_train.families.qwen_inputs import QwenInputs
from subtoken_train.families.qwen_processor import QwenProcessor
from subtoken_train.families.qwen_tower import tower_with_statistics
from subtoken_train.types import Batch, RenderedPrompt, TowerStatistics, Turn, VisualStates

HUB = "https://huggingface.co/Qwen"


class QwenVLFamily(QwenInputs):
    """A ``Qwen...VLForConditionalGeneration`` behind the family interface.

    Positions are mRoPE ids, made for every batch from its own visual tokens and grids: nothing is kept in the model
    between calls.
    """

    system_text: ClassVar[str] = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    """What its template writes where a conversation has no system text."""
    auto_processor = QwenProcessor
    lora_pattern = r"model\.language_model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"
    unquantised: ClassVar[tuple[str, ...]] = ("lm_head", "model.visual")

    def render(self, turns: Iterable[Turn]) -> RenderedPrompt:
        r"""Qwen's ChatML with its default system text, if it has one; pictures stand where the prompt has them.

        ``<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|>
        <|vision_end|>question<|im_end|>\n<|im_start|>assistant\nanswer<|im_end|>\n``, in one piece. White space beside
        a picture is dropped. An answer's span ends with its ``<|im_end|>``; the newline after it carries no loss.
        """
        marker = self.processor.image_token
        picture = f"<|vision_start|>{marker}<|vision_end|>"
        text, spans = self.system_text, []
        for turn in turns:
            words = picture.join(part.strip() for part in turn.prompt.split("<image>"))
            text += f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
            if turn.answer is not None:
                start = len(text)
                text += f"{turn.answer.strip()}<|im_end|>"
                spans.append((start, len(text)))
                text += "\n"
        return RenderedPrompt(text, spans, marker)

    @torch.no_grad()
    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates | None:
        """The tower's merged embeddings, in raster order; statistics are those of its last block (see ``qwen_tower``).

        There is no class token.
        """
        if batch.pixel_values is None:
            return None
        assert batch.image_grid_I3 is not None
        tower, grid_I3 = self.model.model.visual, batch.image_grid_I3
        patches, sizes = batch.pixel_values.to(tower.dtype), [self.grid_tokens(grid) for grid in grid_I3.tolist()]
        if statistics is None:
            made, received, keys = tower(patches, grid_thw=grid_I3), None, None
        else:
            made, *parts = tower_with_statistics(tower, patches, grid_I3)
            received, keys = (list(torch.split(part, sizes)) for part in parts)
        layers = getattr(made, "deepstack_features", None)
        deep = None if layers is None else list(torch.split(torch.stack(list(layers)), sizes, 1))
        return VisualStates(list(torch.split(made.pooler_output, sizes)), None, received, keys, deep)

    def project(self, states_TC: Tensor) -> Tensor:
        """Nothing to do: the tower ends in the language model's width."""
        return states_TC

    def image_bytes(self) -> int:
        """Bytes of the nominal image's flattened patches, fp32."""
        return int(self.visual_tokens() * self.vision.spatial_merge_size**2 * self._patch_bytes())

    def tower_bytes(self, pixel_bytes: int) -> int:
        """Most that is live at once: the pixels (fp32 in ``pixel_bytes``) in the tower's dtype, and ``block_bytes``."""
        patches, element = pixel_bytes // self._patch_bytes(), self.shape.element_bytes
        return int(copied_bytes(pixel_bytes, element) + patches * self.block_bytes(element))

    @abstractmethod
    def block_bytes(self, element: int) -> int:
        """Most that is live at once in the tower's blocks for a patch, elements being of so many bytes."""

    def attention_bytes(self, channels: int, element: int) -> int:
        """Of an attention over patches of C channels, for a patch.

        Queries and keys are turned in fp32: the two copies, the turned query, and three products of the key, 4 C each,
        beside query, key and value, the residual and the norm's output.
        """
        return channels * (6 * FP32_BYTES + 5 * element)

    def _patch_bytes(self) -> int:
        """A patch of flattened pixels, fp32."""
        vision = self.vision
        return int(FP32_BYTES * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)
