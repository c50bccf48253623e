"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3-VL with experts."""

from subtoken_train.families.qwen_vl.model import Qwen2VLFamily, Qwen3VLFamily, Qwen3VLMoeFamily, Qwen25VLFamily

__all__ = ["Qwen2VLFamily", "Qwen3VLFamily", "Qwen3VLMoeFamily", "Qwen25VLFamily"]
