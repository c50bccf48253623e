"""Qwen3-VL (4B, 8B) in the transformers 5 format: deep-stacked visual features, interleaved mRoPE, q/k norms.

Features of three blocks of the tower (``deep``) are added to the visual rows after the first three decoder layers, to
rows that are there: what a reducer drops or evicts takes its features along. A tower reducer's merged token keeps its
target's. The last of the tower's blocks is where VisionZip looks, as for Qwen2.5-VL; the papers have no Qwen3-VL.

Of a video each layer of two frames is a run of its own behind its time: ``<0.5 seconds><|vision_start|>...
<|vision_end|>``, the mean of its frames' times, as text rows. The pair of marks that the chat template writes around a
video stays around all of it, as transformers' processor has it since 5.0; that of 4.57 took it away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from subtoken_train.families.images import FP32_BYTES, Video
from subtoken_train.families.qwen_inputs import VIDEO_LAYERS
from subtoken_train.families.qwen_vl import QwenVLFamily
from subtoken_train.types import APACHE, Licence


class Qwen3VLFamily(QwenVLFamily):
    """``Qwen3VLForConditionalGeneration`` behind the family interface."""

    name = "qwen3_vl"
    title = "Qwen3-VL"
    system_text = ""
    least_pixels = 256 * 256
    published: ClassVar[dict[str, Callable[[], Any]]] = {
        "Qwen/Qwen3-VL-4B-Instruct": lambda: _published(2560, 9728, 36, True, (1024, 4096, 24, (5, 11, 17))),
        "Qwen/Qwen3-VL-8B-Instruct": lambda: _published(4096, 12288, 36, False, (1152, 4304, 27, (8, 16, 24))),
    }
    licences: ClassVar[dict[str, Licence]] = {"Qwen/Qwen3-VL-4B-Instruct": APACHE, "Qwen/Qwen3-VL-8B-Instruct": APACHE}
    # 336 x 336 scaled to 320 x 320 is 100 tokens; the same six-token question, and no system text
    paper_text: ClassVar[dict[str, int]] = {"system": 4, "query": 12}

    def frame_size(self, video: Video) -> tuple[int, int]:
        """(height, width) in pixels, by the rule of its own video processor: all frames together are bounded."""
        self._check_aspect(*video.size)
        depth = int(self.vision.temporal_patch_size)
        frames, bound = max(len(video.frames), depth), VIDEO_LAYERS * depth * self.max_pixels
        high, wide = smart_resize(frames, *video.size, depth, self.unit, self.min_pixels, bound)
        return int(high), int(wide)

    def video_text(self, video: Video, tokens: int) -> str:
        """The layers' times and placeholders."""
        depth, last = int(self.vision.temporal_patch_size), len(video.frames) - 1
        run = f"<|vision_start|>{self.processor.video_token * tokens}<|vision_end|>"
        starts = range(0, len(video.frames), depth)
        ends = [(start / video.fps, min(start + depth - 1, last) / video.fps) for start in starts]
        return "".join(f"<{(first + end) / 2:.1f} seconds>{run}" for first, end in ends)

    def video_runs(self, grid: list[int]) -> list[int]:
        """A run per layer."""
        return [self.grid_tokens([1, *grid[1:]])] * grid[0]

    def block_bytes(self, element: int) -> int:
        """An attention's, or the position embeddings': four of a patch, and each times its weight in fp32."""
        channels, merged = self.vision.hidden_size, self.vision.spatial_merge_size**2
        deep = len(self.vision.deepstack_visual_indexes) * self.hidden_size * element // merged
        embedding = channels * (5 * element + 4 * FP32_BYTES)
        return int(max(self.attention_bytes(channels, element) + deep, embedding))


def _published(
    width: int, mlp: int, layers: int, tied: bool, tower: tuple[int, int, int, tuple[int, ...]]
) -> Qwen3VLConfig:
    text = {
        "vocab_size": 151936,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    }
    vision_width, vision_mlp, depth, deep = tower
    vision = {
        "hidden_size": vision_width,
        "intermediate_size": vision_mlp,
        "depth": depth,
        "deepstack_visual_indexes": list(deep),
        "out_hidden_size": width,
    }
    return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)
