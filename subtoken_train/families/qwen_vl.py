"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4.1V and GLM-4.5V in the transformers 5 format: chat format, tower, memory.

Legend: P patches of all images in the tower's window order, T visual tokens of all images, C tower output width (the
model's), H heads, d head width, L layers of all grids.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as glm_resize
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
from transformers.vision_utils import get_vision_window_index

from subtoken_train.families.chat import CHATML, ChatFormat, joined
from subtoken_train.families.family import PilReader
from subtoken_train.families.images import FP32_BYTES, UNCUT, Picture, Video, copied_bytes
from subtoken_train.families.qwen_inputs import IMAGE, VIDEO, VIDEO_LAYERS, QwenInputs
from subtoken_train.families.towers import received_attention, with_inputs
from subtoken_train.types import Batch, TowerStatistics, VisualStates

QwenProcessor = PilReader(Qwen2VLImageProcessorPil, "<|image_pad|>", "<|video_pad|>")


_CHAT = replace(CHATML, words=lambda prompt, picture: joined(prompt, f"<|vision_start|>{picture}<|vision_end|>"))


class QwenVLFamily(QwenInputs):
    """A ``Qwen...VLForConditionalGeneration`` behind the family interface; nothing is kept between calls."""

    auto_processor: Any = QwenProcessor
    unquantised = ("lm_head", "model.visual")
    # with the system text that the template writes where a conversation has none
    chat = replace(_CHAT, begin="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    # 171 = 27 + 144: a 336 x 336 image; this chat format makes 27 of a six-token question, 15 of them before the image
    paper_text: ClassVar[dict[str, int]] = {"system": 15, "query": 12}

    @torch.no_grad()
    def visual_states(self, batch: Batch, statistics: TowerStatistics | None = None) -> VisualStates:
        """Return the tower's merged embeddings, in raster order; statistics are from its last block."""
        assert batch.pixel_values is not None
        assert batch.image_grid_I3 is not None
        tower, grid_I3 = self.model.model.visual, batch.image_grid_I3
        patches, sizes = batch.pixel_values.to(tower.dtype), [self.grid_tokens(grid) for grid in grid_I3.tolist()]
        layers_L3 = grid_I3.repeat_interleave(grid_I3[:, 0], 0)
        layers_L3[:, 0] = 1  # a video's layers are pictures to the towers; GLM's takes them as such alone
        if statistics is None:
            made, received, keys = tower(patches, grid_thw=layers_L3), None, None
        else:
            made, *parts = tower_with_statistics(tower, patches, layers_L3)
            received, keys = (list(torch.split(part, sizes)) for part in parts)
        layers = getattr(made, "deepstack_features", None)
        deep = None if layers is None else list(torch.split(torch.stack(list(layers)), sizes, 1))
        return VisualStates(list(torch.split(made.pooler_output, sizes)), None, received, keys, deep)

    def project(self, states_TC: Tensor) -> Tensor:
        return states_TC  # the tower ends in the language model's width

    def image_bytes(self) -> int:
        return int(self.visual_tokens() * self.vision.spatial_merge_size**2 * self._patch_bytes())

    def tower_bytes(self, pixel_bytes: int) -> int:
        """Return the peak bytes: the pixels (fp32 in ``pixel_bytes``) in the tower's dtype, and ``block_bytes``."""
        patches, element = pixel_bytes // self._patch_bytes(), self.shape.element_bytes
        return int(copied_bytes(pixel_bytes, element) + patches * self.block_bytes(element))

    @abstractmethod
    def block_bytes(self, element: int) -> int:
        """Return the peak bytes in the tower's blocks for a patch, with elements of ``element`` bytes."""

    def attention_bytes(self, channels: int, element: int) -> int:
        """Return the bytes of an attention for a patch: 6 C of turned queries and keys in fp32, and 5 C of states."""
        return channels * (6 * FP32_BYTES + 5 * element)

    def _patch_bytes(self) -> int:
        vision = self.vision
        return int(FP32_BYTES * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)


class Qwen2VLFamily(QwenVLFamily):
    """Qwen2-VL (2B, 7B): every block of its tower sees a whole frame; time counts layers."""

    name = "qwen2_vl"

    def block_bytes(self, element: int) -> int:
        channels, ratio = self.vision.embed_dim, self.vision.mlp_ratio
        return int(max(self.attention_bytes(channels, element), channels * element * (2 + 3 * ratio)))


class Qwen25VLFamily(QwenVLFamily):
    """Qwen2.5-VL (3B, 7B): a tower with windows, mRoPE whose time counts seconds."""

    name = "qwen2_5_vl"
    image_inputs = (*QwenVLFamily.image_inputs, "second_per_grid_ts")

    def seconds(self, pictures: Sequence[Picture]) -> Tensor | None:
        depth = self.vision.temporal_patch_size
        found = [depth / picture.fps if isinstance(picture, Video) else 0.0 for picture in pictures]
        return torch.tensor(found) if any(found) else None

    def read_seconds(self, given: Mapping[str, Tensor], kinds: list[int]) -> Tensor | None:
        """Read ``second_per_grid_ts``, of the videos; one second if it is not given, as in transformers."""
        videos, given_V = kinds.count(VIDEO), given.get("second_per_grid_ts")
        if given_V is not None and given_V.numel() != videos:
            raise ValueError(f"second_per_grid_ts has {given_V.numel()} values for {videos} videos; {UNCUT}")
        if not videos:
            return None
        seconds_V = iter([1.0] * videos if given_V is None else given_V.flatten().tolist())
        return torch.tensor([next(seconds_V) if kind == VIDEO else 0.0 for kind in kinds])

    def block_bytes(self, element: int) -> int:
        return self.attention_bytes(self.vision.hidden_size, element)


class TimedVLFamily(QwenVLFamily):
    """A family that shows each layer of a video as a run of its own beside its time, which is text."""

    def frame_size(self, video: Video) -> tuple[int, int]:
        self.check_aspect(*video.size)
        depth = int(self.vision.temporal_patch_size)
        frames, bound = max(len(video.frames), depth), VIDEO_LAYERS * depth * self.max_pixels
        high, wide = smart_resize(frames, *video.size, depth, self.unit, self.counted * self.min_pixels, bound)
        return int(high), int(wide)

    def video_runs(self, grid: list[int]) -> list[int]:
        return [self.grid_tokens([1, *grid[1:]])] * grid[0]


class Qwen3VLFamily(TimedVLFamily):
    """Qwen3-VL (4B, 8B): deep-stacked visual features, interleaved mRoPE, q/k norms.

    Features of three blocks of the tower (``deep``) are added to the visual rows that are there after the first three
    decoder layers. A tower reducer's merged token keeps its target's. VisionZip looks at the last of the tower's
    blocks, as for Qwen2.5-VL. Each layer of a video's two frames is a run behind its time, the mean of its frames', as
    text rows: ``<0.5 seconds><|vision_start|>...<|vision_end|>``.
    """

    name = "qwen3_vl"
    least_pixels = 256 * 256
    chat = _CHAT
    # 336 x 336 scaled to 320 x 320 is 100 tokens; the same six-token question, and no system text
    paper_text: ClassVar[dict[str, int]] = {"system": 4, "query": 12}

    def video_text(self, video: Video, tokens: int) -> str:
        depth, last = int(self.vision.temporal_patch_size), len(video.frames) - 1
        run = f"<|vision_start|>{self.processor.video_token * tokens}<|vision_end|>"
        starts = range(0, len(video.frames), depth)
        ends = [(start / video.fps, min(start + depth - 1, last) / video.fps) for start in starts]
        return "".join(f"<{(first + end) / 2:.1f} seconds>{run}" for first, end in ends)

    def block_bytes(self, element: int) -> int:
        channels, merged = self.vision.hidden_size, self.vision.spatial_merge_size**2
        deep = len(self.vision.deepstack_visual_indexes) * self.hidden_size * element // merged
        return int(max(self.attention_bytes(channels, element) + deep, channels * (5 * element + 4 * FP32_BYTES)))


class Qwen3VLMoeFamily(Qwen3VLFamily):
    """Qwen3-VL with experts (30B-A3B, 235B-A22B): all else is Qwen3-VL's."""

    name = "qwen3_vl_moe"


GlmProcessor = PilReader(Glm4vImageProcessorPil, "<|image|>", "<|image|>")


class Glm4vFamily(TimedVLFamily):
    """GLM-4.1V (9B): Qwen's patches, grids and mRoPE positions, which turn half of a head's channels.

    It thinks before it answers. An image's bounds count its pixels twice, once for each frame of a patch. One
    placeholder stands for images and for videos, which are told by the marks around them; each layer of a video stands
    between an image's marks and has the whole seconds of its first frame behind it.
    """

    name = "glm4v"
    least_pixels = 112 * 112 // 2
    counted = 2
    auto_processor: Any = GlmProcessor
    # of a question of six tokens: [gMASK]<sop><|user|>\n<|begin_of_image|>; <|end_of_image|> and <|assistant|>\n
    paper_text: ClassVar[dict[str, int]] = {"system": 5, "query": 9}
    # an answer's <|user|> opens the next question and ends what the model says, as in the authors' own fine-tuning
    chat = ChatFormat("\n{}<|assistant|>\n", "{}<|user|>", "[gMASK]<sop><|user|>")

    def kinds(self, ids: Tensor) -> Tensor:
        """Return ``mm_token_type_ids``: 2 at placeholders between a video's marks, 1 at others, 0 at text."""
        config = self.model.config
        opened, closed = ((ids == mark).cumsum(-1) for mark in (config.video_start_token_id, config.video_end_token_id))
        kinds: Tensor = (ids == config.image_token_id).int() * torch.where(opened > closed, VIDEO, IMAGE)
        return kinds

    def image_size(self, height: int, width: int) -> tuple[int, int]:
        """Return (height, width) in pixels; a side below a visual token is scaled up first, the other with it."""
        self.check_aspect(height, width)
        bounds = (self.counted * self.min_pixels, self.counted * self.max_pixels)
        high, wide = glm_resize(self.counted, height, width, self.counted, self.unit, *bounds)
        return int(high), int(wide)

    def picture_text(self, picture: Picture, marker: str, together: int = 1) -> str:
        text = super().picture_text(picture, marker, together)
        kind = "video" if isinstance(picture, Video) else "image"
        return f"<|begin_of_{kind}|>{text}<|end_of_{kind}|>"

    def video_text(self, video: Video, tokens: int) -> str:
        run = f"<|begin_of_image|>{self.processor.video_token * tokens}<|end_of_image|>"
        starts = range(0, len(video.frames), int(self.vision.temporal_patch_size))
        return "".join(f"{run}{int(start / video.fps)}" for start in starts)

    def block_bytes(self, element: int) -> int:
        channels, inner = self.vision.hidden_size, self.vision.out_hidden_size
        return int(max(self.attention_bytes(channels, element), element * (2 * channels + 3 * inner)))


class Glm4vMoeFamily(Glm4vFamily):
    """GLM-4.5V (106B-A12B): GLM-4.1V's tower before a decoder with experts; asked and trained with its thinking off."""

    name = "glm4v_moe"
    # and /nothink, <think></think>\n
    paper_text: ClassVar[dict[str, int]] = {"system": 5, "query": 13}
    chat = replace(Glm4vFamily.chat, asked="\n{}/nothink<|assistant|>\n<think></think>\n")


@torch.no_grad()
def tower_with_statistics(tower: Any, patches: Tensor, grid_I3: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Run the tower and recompute what VisionZip reads of its last block, so that it keeps its fast attention.

    A patch counts by the attention it receives, summed over the patches of its own image (a video's: of its layer) and
    averaged over heads; a visual token is the mean of its merge group. Keys are taken after the rotary embedding, as in
    VisionZip's Qwen2.5-VL release. Returns (the tower's output, attention received [T], keys [T, d]), the last two in
    fp32, in raster order.
    """
    last = len(tower.blocks) - 1
    windows = getattr(tower, "window_size", None) is not None
    if windows and last not in tower.fullatt_block_indexes:
        raise ValueError(f"visionzip needs a tower whose last block, {last}, attends to the whole image")
    attention = tower.blocks[last].attn
    made, (normed, *_), options = with_inputs(attention, lambda: tower(patches, grid_thw=grid_I3))
    query_PHd, key_PHd, _ = attention.qkv(normed).unflatten(-1, (3, attention.num_heads, -1)).unbind(1)
    query_PHd, key_PHd = apply_rotary_pos_emb_vision(query_PHd, key_PHd, *options["position_embeddings"])
    received_P = received_attention(query_PHd, key_PHd, options["cu_seqlens"].diff().tolist(), attention.scaling)
    window_index_T = torch.arange(len(made.pooler_output))
    if windows:
        sizes = {"window_size": tower.window_size, "patch_size": tower.patch_size}
        window_index_T, _ = get_vision_window_index(grid_I3, tower.spatial_merge_size, **sizes)
    return made, per_token(received_P, window_index_T), per_token(key_PHd, window_index_T).mean(1)


def per_token(values_P: Tensor, window_index_T: Tensor) -> Tensor:
    """Average each visual token's patches, [P, ...] to [T, ...] in fp32, from window order (of raster places)."""
    merged_T = values_P.float().reshape(len(window_index_T), -1, *values_P.shape[1:]).mean(1)
    return merged_T[window_index_T.argsort().to(merged_T.device)]
