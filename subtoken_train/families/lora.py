"""LoRA by peft with the match counts asserted: on q and v, and in two-stage training a second one on ``o_proj``."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer

from subtoken_train.errors import check_range
from subtoken_train.families.family import Family

MAIN_ADAPTER = "default"
OUTPUT_ADAPTER = "output"
"""peft's names of the q/v adapter and of the one on ``o_proj``; peft saves the second into a folder of its name."""


@dataclass
class LoraSettings:
    """Adapter settings.

    Attributes:
        rank: LoRA rank.
        alpha: ``lora_alpha`` (the paper's "scaling"); the update is multiplied by alpha / rank.
        dropout: on the adapter's input.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.05

    def __post_init__(self) -> None:
        check_range("lora rank", self.rank, 1, 2**16)
        check_range("lora alpha", self.alpha, 1, 10**6)
        check_range("lora dropout", self.dropout, 0, 0.99)


def add_lora(family: Family, settings: LoraSettings) -> PeftModel:
    """Put LoRA on q and v (of a fused projection, on k too) of every layer, in place, and freeze everything else."""
    config = _peft_config(settings, family.adapted)
    family.model.requires_grad_(False)
    with warnings.catch_warnings():
        # peft's own call into transformers, at every adapter
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
        peft_model = get_peft_model(family.model, config)
    modules, where = (1, "fused q, k and v") if family.fused else (2, "q and v")
    _settle(family, peft_model, MAIN_ADAPTER, family.adapted, modules, where)
    return peft_model


def add_output_lora(family: Family, peft_model: PeftModel, settings: LoraSettings) -> None:
    """Put a second adapter on ``o_proj`` of every layer, which starts at zero; both are active, only it trains."""
    peft_model.add_adapter(OUTPUT_ADAPTER, _peft_config(settings, family.output_pattern))
    # the tuner takes several names, PeftModel only one; it also switches gradients on for all of them
    peft_model.base_model.set_adapter([MAIN_ADAPTER, OUTPUT_ADAPTER])
    for name, parameter in family.model.named_parameters():
        parameter.requires_grad_(name.endswith(f".{OUTPUT_ADAPTER}.weight"))
    _settle(family, peft_model, OUTPUT_ADAPTER, family.output_pattern, 1, "o_proj")


def remove_lora(family: Family) -> None:
    """Take every LoRA out again; the weights under it were never changed."""
    model = family.model
    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    for trace in ("peft_config", "active_adapter"):
        if trace in vars(model):
            delattr(model, trace)


def _peft_config(settings: LoraSettings, pattern: str) -> LoraConfig:
    return LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, lora_dropout=settings.dropout, target_modules=pattern, bias="none"
    )


def _settle(family: Family, model: PeftModel, adapter: str, pattern: str, modules: int, where: str) -> None:
    """Check how many modules of a layer an adapter sits on, and turn what trains to fp32."""
    config = model.peft_config[adapter]
    # of a model of experts peft rewrites what an adapter's file says, as it does when it reads one
    config.target_modules, config.target_parameters = pattern, None
    matched = [name for name, module in family.model.named_modules() if adapter in getattr(module, "lora_A", ())]
    if len(matched) != modules * (layers := family.shape.num_layers):
        raise ValueError(
            f"LoRA matched {len(matched)} modules, expected {modules * layers} ({where} of {layers} language-model "
            f"layers): this transformers version names them differently ({matched[:2]} ...)"
        )
    for parameter in family.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
