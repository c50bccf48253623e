"""The token-only adapter that stage 2 of two-stage training starts from: is it the right one, and its tensors."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import Tensor

from subtoken_train.artifact.config import LORA_FILE, AdapterConfig, read_config
from subtoken_train.artifact.folder import lora_tensors
from subtoken_train.artifact.identity import check_identity, identify
from subtoken_train.artifact.source import adapter_in
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.family import Family
from subtoken_train.families.lora import LoraSettings
from subtoken_train.reducers.base import Reducer


@dataclass(frozen=True)
class FirstStage:
    """A token-only adapter folder that a recipe's stage 2 may start from; see ``read_first_stage``."""

    folder: Path
    config: AdapterConfig

    def digest(self) -> str:
        """SHA-256 of the LoRA's file as it is now."""
        return hashlib.sha256((self.folder / LORA_FILE).read_bytes()).hexdigest()

    def tensors(self, family: Family, backbone: BackboneConfig, peft_model: PeftModel) -> dict[str, Tensor]:
        """The LoRA's tensors, by the names that ``set_peft_model_state_dict`` takes.

        Args:
            family: stage 2's backbone, loaded or laid out.
            backbone: where it came from.
            peft_model: the model with the LoRA that they must fit exactly.

        Raises:
            ValueError: the adapter belongs to another backbone, or its file does not hold exactly this LoRA.
        """
        check_identity(self.config.identity, identify(family, backbone))
        return lora_tensors(self.folder, peft_model)


def read_first_stage(folder: Path, reducer: Reducer, lora: LoraSettings | None) -> FirstStage:
    """Read stage 1's configuration (no weights) and check it against stage 2's recipe.

    Args:
        folder: the token-only adapter, or its run.
        reducer: the recipe's token reducer; stage 1 must have been trained under the same one.
        lora: the recipe's LoRA settings, None where it has none; they must be stage 1's.

    Raises:
        ValueError: no such folder, it holds a routed adapter, or it was trained with other settings.
    """
    if not folder.is_dir():
        raise ValueError(f"stage2.adapter {folder} does not exist; train the token-only recipe (routing: null) first")
    folder = adapter_in(folder) or folder
    config = read_config(folder)
    if config.routing is not None:
        raise ValueError(
            f"stage2.adapter {folder} already routes ({config.routing.selector}, S={config.routing.num_groups}, "
            f"K={config.routing.kept_groups}); stage 2 starts from a token-only adapter (routing: null)"
        )
    differing = _differing("reducer", config.reducer, reducer)
    if lora is not None:
        differing += _differing("lora", config.lora, lora)
    if differing:
        raise ValueError(f"stage2.adapter {folder} was trained with {', '.join(differing)}")
    return FirstStage(folder, config)


def _differing(group: str, trained: Any, recipe: Any) -> list[str]:
    """The keys of two settings that differ, in words; of two methods' those that both have."""
    ours = asdict(recipe)
    return [
        f"{group}.{key} {value} (the recipe has {ours[key]})"
        for key, value in asdict(trained).items()
        if key in ours and value != ours[key]
    ]
