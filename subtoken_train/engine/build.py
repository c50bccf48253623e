"""Put a run's parts together: backbone, LoRA, reducer, routers; and what the second of two stages starts from.

Two-stage training (paper, section 4.4): stage 1 is an ordinary token-only run; stage 2 freezes its q/v LoRA and trains
value-group routers on top, alone or with a small LoRA on ``o_proj`` ("oLoRA" in the paper; it is not peft's OLoRA
initialisation). Keys, queries and the cache ratio are those of the routed arm either way.
"""

from dataclasses import dataclass, replace

import torch
from peft import PeftModel

from subtoken_train.calibrations import read_calibration
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import at_place
from subtoken_train.evictions.kvzip import KVzap, TokenScorers
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.family import Family, check_calibration
from subtoken_train.families.load import load_family
from subtoken_train.families.lora import LoraSettings, add_lora, add_output_lora
from subtoken_train.reducers.base import Reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank
from subtoken_train.routing.routers import LinearRouter, MLPRouter, start_from


@dataclass
class Stage2Config:
    """Settings of stage 2.

    Attributes:
        adapter: folder of stage 1's adapter, trained on the same backbone without routing: under the same token
            reducer, under none, or as the matched anchor (``artifact.first_stage``). Its LoRA is frozen and runs
            without dropout.
        output_lora: LoRA on ``o_proj``, trained beside the routers; null trains the routers alone.
    """

    adapter: str
    output_lora: LoraSettings | None = None


def build(
    backbone: BackboneConfig,
    lora: LoraSettings,
    reducer: Reducer,
    routing: RoutingConfig | None,
    stage2: Stage2Config | None = None,
) -> tuple[CompressedBackbone, PeftModel]:
    """Load the backbone and attach reducer, LoRA and routers, freshly initialised."""
    with torch.random.fork_rng(devices=[]):
        family = load_family(backbone, reducer)
    compressed, peft_model = assemble(family, lora, reducer, routing, stage2)
    start_warm(compressed)
    return compressed, peft_model


def start_warm(compressed: CompressedBackbone) -> None:
    """Let routers start as the nets of the file that ``RoutingConfig.warm_start`` names, if it names one."""
    bank, family = compressed.bank, compressed.family
    if bank is None or bank.config.warm_start is None:
        return
    calibration = read_calibration(bank.config.warm_start, KVzap.name, TokenScorers)
    check_calibration(calibration, family)
    for selector, net in zip(bank.selectors, calibration.numbers.nets, strict=True):
        assert isinstance(selector, LinearRouter | MLPRouter)
        with at_place(f"warm_start {bank.config.warm_start}: "):
            start_from(selector, net)


def assemble(
    family: Family,
    lora: LoraSettings,
    reducer: Reducer,
    routing: RoutingConfig | None,
    stage2: Stage2Config | None = None,
) -> tuple[CompressedBackbone, PeftModel]:
    """Attach reducer, LoRA and routers to a family that is already loaded (or laid out on the meta device)."""
    peft_model = add_adapters(family, lora, stage2)
    bank = None if routing is None else RouterBank(routing, family.hidden_size, family.shape)
    if stage2 is not None and bank is None:
        raise ValueError("model.stage2 trains routers on a token-only adapter: set model.routing, or drop model.stage2")
    if stage2 is not None and bank is not None and not bank.learned and stage2.output_lora is None:
        idle = f"selector {bank.config.selector!r} has no parameters and output_lora is null"
        raise ValueError(f"model.stage2 has nothing to train: {idle}; use a learned router, or set output_lora")
    return CompressedBackbone(family, reducer, bank), peft_model


def add_adapters(family: Family, lora: LoraSettings, stage2: Stage2Config | None) -> PeftModel:
    """Add LoRA alone: an ordinary run's, or stage 1's, frozen and still to be loaded, and any on ``o_proj``."""
    if stage2 is None:
        return add_lora(family, lora)
    peft_model = add_lora(family, replace(lora, dropout=0.0))
    family.model.requires_grad_(False)
    if stage2.output_lora is not None:
        add_output_lora(family, peft_model, stage2.output_lora)
    return peft_model
