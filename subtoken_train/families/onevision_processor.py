"""What turns text, images and frames into LLaVA-OneVision's inputs, without torchvision.

transformers' own processor wants its video processor, which needs torchvision. Frames go through the image processor
here, as the whole of a picture does; that the video processor gives the same pixels is not proven.
"""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from subtoken_train.families.pil_processor import PilProcessor


class OnevisionProcessor(PilProcessor):
    """Tokenizer and PIL image processor."""

    image_reader: ClassVar[Any] = LlavaOnevisionImageProcessorPil
    image_token: ClassVar[str] = "<image>"
    video_token: ClassVar[str] = "<video>"
