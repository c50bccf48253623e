"""What turns text and pictures into a Qwen-VL's inputs, without torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil


class QwenProcessor:
    """Tokenizer and PIL image processor; the same pixels with and without torchvision. Videos are not supported."""

    image_token = "<|image_pad|>"

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(
        cls, source: str, revision: str | None = None, trust_remote_code: bool = False
    ) -> QwenProcessor:
        """Read both from a folder or the Hub, whichever image processor class the checkpoint names."""
        return cls(
            Qwen2VLImageProcessorPil.from_pretrained(source, revision=revision),
            AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code),
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write both into a checkpoint folder."""
        self.image_processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
