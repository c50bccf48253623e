"""Put a run's parts together: backbone, LoRA, reducer, routers."""

from __future__ import annotations

import torch
from peft import PeftModel

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.stage2 import Stage2Config, add_stage2_lora, check_stage2
from subtoken_train.families.base import Family
from subtoken_train.families.load import BackboneConfig, load_family
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.reducers import ReducerConfig, build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank


def build(
    backbone: BackboneConfig,
    lora: LoraSettings,
    reducer: ReducerConfig,
    routing: RoutingConfig | None,
    stage2: Stage2Config | None = None,
) -> tuple[CompressedBackbone, PeftModel]:
    """Load the backbone and attach reducer, LoRA and routers, freshly initialised.

    The initial values depend on the seed alone, not on the way the backbone is loaded (sharded loading draws numbers).
    """
    with torch.random.fork_rng(devices=[]):
        family = load_family(backbone)
    return assemble(family, lora, reducer, routing, stage2)


def assemble(
    family: Family,
    lora: LoraSettings,
    reducer: ReducerConfig,
    routing: RoutingConfig | None,
    stage2: Stage2Config | None = None,
) -> tuple[CompressedBackbone, PeftModel]:
    """The same on a family that is already loaded (or laid out on the meta device).

    With ``stage2`` the q/v LoRA is frozen; whoever calls loads stage 1's tensors into it.
    """
    reducer_built = build_reducer(reducer, family.shape.num_layers)
    peft_model = add_adapters(family, lora, stage2)
    bank = None if routing is None else RouterBank(routing, family.hidden_size, family.shape)
    if stage2 is not None:
        check_stage2(stage2, bank)
    return CompressedBackbone(family, reducer_built, bank), peft_model


def add_adapters(family: Family, lora: LoraSettings, stage2: Stage2Config | None) -> PeftModel:
    """LoRA alone: that of an ordinary run, or stage 1's and any on ``o_proj``."""
    return add_lora(family, lora) if stage2 is None else add_stage2_lora(family, lora, stage2)
