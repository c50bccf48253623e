"""GLM-4.1V and GLM-4.5V in the transformers 5 format: chat format, marks of pictures, and what differs from Qwen's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil, smart_resize

from subtoken_train.families.chat import ChatFormat
from subtoken_train.families.family import PilProcessor, published_of
from subtoken_train.families.images import Picture, Video
from subtoken_train.families.qwen_inputs import IMAGE, VIDEO
from subtoken_train.families.qwen_vl import TimedVLFamily


class GlmProcessor(PilProcessor):
    """Tokenizer and PIL image processor, to which frames of videos are images."""

    image_reader = Glm4vImageProcessorPil
    image_token = "<|image|>"
    video_token: ClassVar[str] = image_token


class Glm4vFamily(TimedVLFamily):
    """GLM-4.1V (9B): Qwen's patches, grids and mRoPE positions, which turn half of a head's channels.

    It thinks before it answers, and its template has no way to turn that off. An image's bounds count its pixels twice,
    once for each frame of a patch. One placeholder stands for images and for videos, which are told by the marks around
    them; each layer of a video stands between an image's marks and has the whole seconds of its first frame behind it.
    Frames are given: the published processors choose them by themselves.
    """

    name = "glm4v"
    title = "GLM-4V"
    least_pixels = 112 * 112 // 2
    counted = 2
    auto_processor: Any = GlmProcessor
    published, licences = published_of("glm4v")
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
        high, wide = smart_resize(self.counted, height, width, self.counted, self.unit, *bounds)
        return int(high), int(wide)

    def picture_text(self, picture: Picture, marker: str, together: int = 1) -> str:
        text = super().picture_text(picture, marker, together)
        return f"<|begin_of_video|>{text}<|end_of_video|>" if isinstance(picture, Video) else _marked(text)

    def video_text(self, video: Video, tokens: int) -> str:
        run = _marked(self.processor.video_token * tokens)
        starts = range(0, len(video.frames), int(self.vision.temporal_patch_size))
        return "".join(f"{run}{int(start / video.fps)}" for start in starts)

    def block_bytes(self, element: int) -> int:
        """Return an attention's, or an MLP's: residual, norm, and three of its inner width."""
        channels, inner = self.vision.hidden_size, self.vision.out_hidden_size
        return int(max(self.attention_bytes(channels, element), element * (2 * channels + 3 * inner)))


class Glm4vMoeFamily(Glm4vFamily):
    """GLM-4.5V (106B-A12B): GLM-4.1V's tower before a decoder with experts; asked and trained with its thinking off."""

    name = "glm4v_moe"
    title = "GLM-4.5V"
    published, licences = published_of("glm4v_moe")
    # and /nothink, <think></think>\n
    paper_text: ClassVar[dict[str, int]] = {"system": 5, "query": 13}
    chat = replace(Glm4vFamily.chat, asked="\n{}/nothink<|assistant|>\n<think></think>\n")


def _marked(placeholders: str) -> str:
    return f"<|begin_of_image|>{placeholders}<|end_of_image|>"
