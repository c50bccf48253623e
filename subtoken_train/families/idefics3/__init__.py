"""Idefics3 and SmolVLM."""

from subtoken_train.families.idefics3.model import Idefics3Family, SmolVLMFamily

__all__ = ["Idefics3Family", "SmolVLMFamily"]
