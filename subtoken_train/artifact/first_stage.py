"""The adapter that stage 2 of two-stage training starts from: is it one of those that may serve, and its tensors.

READING. The paper (section 4.4) says that "the LoRA-adapted VLM backbone and token-level anchor are first trained and
fixed", not at which token keep ratio. Three adapters fit these words, and each is taken under its own name:

- ``SAME_TOKENS``: token-only, trained under the very reducer of stage 2 (the default, which the recipes name);
- ``LORA_ONLY``: LoRA trained without a token reducer;
- ``MATCHED_ANCHOR``: token-only, the same reducer at the keep ratio that has stage 2's bytes.

The name stands in what ``check`` prints, in what ``fit`` says at its start, and in the adapter's card.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
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
from subtoken_train.routing import RoutingConfig

SAME_TOKENS = "token-only, under the same reducer"
LORA_ONLY = "LoRA alone, without a token reducer"
MATCHED_ANCHOR = "the matched token-only anchor"
ONE_TOKEN = Fraction(1, 64)
"""Share by which an anchor's keep ratio may lie above its arm's bytes: a token of the smallest image that is served."""


@dataclass(frozen=True)
class FirstStage:
    """An adapter folder that a recipe's stage 2 may start from; see ``read_first_stage``.

    Attributes:
        folder: the adapter.
        config: its configuration.
        reading: which of the paper's possible stages 1 it is, one of this file's three.
    """

    folder: Path
    config: AdapterConfig
    reading: str

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


def read_first_stage(
    folder: Path, reducer: Reducer, routing: RoutingConfig | None, lora: LoraSettings | None
) -> FirstStage:
    """Read stage 1's configuration (no weights), check it against stage 2's recipe, and name the reading that it is.

    Args:
        folder: the token-only adapter, or its run.
        reducer: the recipe's token reducer.
        routing: the recipe's routing, whose bytes tell a matched anchor; None: none is recognised.
        lora: the recipe's LoRA settings, None where it has none; they must be stage 1's.

    Raises:
        ValueError: no such folder, it holds a routed adapter, it is none of the three readings, or its LoRA has other
            settings.
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
    if lora is not None and (differing := _differing("lora", config.lora, lora)):
        raise ValueError(f"stage2.adapter {folder} was trained with {', '.join(differing)}")
    reading = _reading(config.reducer, reducer, routing)
    if reading is None:
        differing = _differing("reducer", config.reducer, reducer)
        raise ValueError(
            f"stage2.adapter {folder} was trained with {', '.join(differing)}; stage 1 has the recipe's reducer, or "
            "none (lora_only), or is the matched anchor"
        )
    return FirstStage(folder, config, reading)


def _reading(trained: Reducer, recipe: Reducer, routing: RoutingConfig | None) -> str | None:
    """Name what stage 1 was trained as; None where it is none of the three."""
    if not _differing("reducer", trained, recipe):
        return SAME_TOKENS
    if not trained.acts:
        return LORA_ONLY
    if routing is None or recipe.staged or not trained.round_up or _own(trained) != _own(recipe):
        return None
    if trained.matches not in (None, recipe.keep_ratio):
        return None
    total = replace(routing.token_budget, keep_ratio=recipe.keep_ratio).exact_total
    return MATCHED_ANCHOR if total <= Fraction(str(trained.keep_ratio)) < total + ONE_TOKEN else None


def _own(reducer: Reducer) -> dict[str, Any]:
    """Return a reducer's settings but for how many tokens it keeps."""
    return {key: value for key, value in asdict(reducer).items() if key not in ("keep_ratio", "round_up", "matches")}


def _differing(group: str, trained: Any, recipe: Any) -> list[str]:
    """The keys of two settings that differ, in words; of two methods' those that both have."""
    ours = asdict(recipe)
    return [
        f"{group}.{key} {value} (the recipe has {ours[key]})"
        for key, value in asdict(trained).items()
        if key in ours and value != ours[key]
    ]
