"""InternVL3."""

from subtoken_train.families.internvl.model import InternVLFamily

__all__ = ["InternVLFamily"]
