"""What turns text and pictures into a Qwen-VL's inputs, without torchvision."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from subtoken_train.families.pil_processor import PilProcessor


class QwenProcessor(PilProcessor):
    """Tokenizer and PIL image processor, to which frames of videos are images."""

    image_reader: ClassVar[Any] = Qwen2VLImageProcessorPil
    image_token: ClassVar[str] = "<|image_pad|>"
    video_token: ClassVar[str] = "<|video_pad|>"
