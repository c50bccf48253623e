"""What turns text and pictures into a model's inputs without torchvision: a tokenizer and a PIL image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from transformers import AutoTokenizer


class PilProcessor:
    """A checkpoint's tokenizer and image processor; the same pixels with and without torchvision."""

    image_reader: ClassVar[Any]
    """The PIL image processor's class."""
    image_token: ClassVar[str]
    """Placeholder of a visual token of an image."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:
        self.image_processor = image_processor
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(cls, source: str, revision: str | None = None, trust_remote_code: bool = False) -> Self:
        """Read both from a folder or the Hub, whichever image processor class the checkpoint names."""
        return cls(
            cls.image_reader.from_pretrained(source, revision=revision),
            AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code),
        )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write both into a checkpoint folder."""
        self.image_processor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
