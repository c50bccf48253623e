"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision."""

from subtoken_train.families.llava.model import LlavaFamily

__all__ = ["LlavaFamily"]
