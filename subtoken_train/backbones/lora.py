"""q/v LoRA on the language model by peft, with the match counts asserted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from subtoken_train.backbones.base import Family


@dataclass
class LoraSettings:
    """Adapter settings.

    Attributes:
        rank: LoRA rank.
        alpha: ``lora_alpha`` (the paper's "scaling"); the update is multiplied by alpha / rank.
        dropout: dropout on the adapter's input.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.05


def add_lora(family: Family, settings: LoraSettings) -> PeftModel:
    """Put LoRA on q and v of every language-model layer, in place, and freeze everything else.

    Returns:
        The ``PeftModel`` around ``family.model`` (which keeps working, adapters included).

    Raises:
        ValueError: rank or dropout out of range, or the backbone's modules are not named as the family expects.
    """
    if settings.rank < 1 or not 0 <= settings.dropout < 1:
        raise ValueError(f"lora rank={settings.rank} must be >= 1 and dropout={settings.dropout} in [0, 1)")
    family.model.requires_grad_(False)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=family.lora_pattern,
        bias="none",
    )
    peft_model = get_peft_model(family.model, config)
    matched = [name for name, module in family.model.named_modules() if hasattr(module, "lora_A")]
    expected = 2 * family.shape.num_layers
    if len(matched) != expected:
        raise ValueError(
            f"LoRA matched {len(matched)} modules, expected {expected} (q and v of {family.shape.num_layers} "
            f"language-model layers): this transformers version names them differently ({matched[:2]} ...)"
        )
    for parameter in family.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    return peft_model
