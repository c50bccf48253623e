"""GLM-4.1V and GLM-4.5V."""

from subtoken_train.families.glm4v.model import Glm4vFamily, Glm4vMoeFamily

__all__ = ["Glm4vFamily", "Glm4vMoeFamily"]
