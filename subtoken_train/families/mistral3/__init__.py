"""Mistral3: Mistral Small with a Pixtral tower."""

from subtoken_train.families.mistral3.model import Mistral3Family

__all__ = ["Mistral3Family"]
