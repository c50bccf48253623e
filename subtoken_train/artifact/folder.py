"""Write and read the adapter folder.

``adapter_config.json`` and ``adapter_model.safetensors`` load with plain peft; ``router.safetensors`` holds the routers
(peft would drop or double them silently); ``subtoken_config.json`` says how they were trained; ``README.md`` is the
model card. After two-stage training the folder holds stage 1's LoRA at the top, as ever, and in ``output/`` the LoRA on
``o_proj`` where there is one, loadable with plain peft as a second adapter. No pickle, no remote code.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

from subtoken_train.artifact.card import model_card
from subtoken_train.artifact.identity import Identity, check_identity, identify
from subtoken_train.artifact.tensors import read_exactly
from subtoken_train.backbones.attach import CompressedBackbone
from subtoken_train.backbones.build import build
from subtoken_train.backbones.load import BackboneConfig
from subtoken_train.backbones.lora import MAIN_ADAPTER, OUTPUT_ADAPTER, LoraSettings
from subtoken_train.backbones.stage2 import Stage2Config
from subtoken_train.reducers import ReducerConfig
from subtoken_train.routing import RoutingConfig

SCHEMA_VERSION = 2
"""1: without ``stage2``. 2: with it; a reader of 1 would leave its output LoRA out."""
CONFIG_FILE = "subtoken_config.json"
LORA_FILE = "adapter_model.safetensors"
ROUTER_FILE = "router.safetensors"


@dataclass
class AdapterConfig:
    """What ``subtoken_config.json`` holds."""

    backbone: BackboneConfig
    lora: LoraSettings
    reducer: ReducerConfig
    routing: RoutingConfig | None
    identity: Identity
    training: dict[str, Any] = field(default_factory=dict)
    """How it came to be: recipe digest, steps, seed; for the reader, never for loading."""
    stage2: Stage2Config | None = None
    """Set where routers were trained on the frozen LoRA of ``stage2.adapter``, which this folder holds as well."""


def write_adapter(
    folder: Path, config: AdapterConfig, backbone: CompressedBackbone, peft_model: PeftModel, overwrite: bool = False
) -> Path:
    """Write the folder whole or not at all (a temporary sibling is renamed).

    Raises:
        ValueError: the folder exists and ``overwrite`` is False.
    """
    if folder.exists() and not overwrite:
        raise ValueError(f"{folder} exists; choose another folder or pass --overwrite")
    temporary = folder.with_name(folder.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    for peft_config in peft_model.peft_config.values():
        peft_config.base_model_name_or_path = config.backbone.path
    peft_model.save_pretrained(temporary, safe_serialization=True, save_embedding_layers=False)
    routers = _router_tensors(backbone)
    if routers:
        save_file(routers, temporary / ROUTER_FILE)
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "lightning", "subtoken_train")}
    record = {"schema_version": SCHEMA_VERSION, **asdict(config), "versions": versions}
    (temporary / CONFIG_FILE).write_text(json.dumps(record, indent=2) + "\n")
    (temporary / "README.md").write_text(model_card(record))
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)
    return folder


def read_config(folder: Path) -> AdapterConfig:
    """Parse ``subtoken_config.json``; a missing, broken or newer one is a worded ``ValueError``."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder} is not an adapter folder: it has no {CONFIG_FILE}")
    try:
        record = json.loads(path.read_text())
        schema = record["schema_version"]
        if schema > SCHEMA_VERSION:
            raise ValueError(f"{path} has schema {schema}, this version reads up to {SCHEMA_VERSION}; please upgrade")
        routing = record["routing"]
        stage2 = record["stage2"] if schema > 1 else None
        return AdapterConfig(
            backbone=BackboneConfig(**record["backbone"]),
            lora=LoraSettings(**record["lora"]),
            reducer=ReducerConfig(**record["reducer"]),
            routing=None if routing is None else RoutingConfig(**routing),
            identity=Identity(**record["identity"]),
            training=record["training"],
            stage2=None if stage2 is None else _stage2_config(**stage2),
        )
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__} {error}") from error


def read_adapter(
    folder: Path, backbone: BackboneConfig | None = None
) -> tuple[AdapterConfig, CompressedBackbone, PeftModel]:
    """Load backbone, LoRA and routers, strictly in both directions.

    Args:
        folder: the adapter folder.
        backbone: overrides where the backbone is loaded from (a local copy, another dtype); its identity must match.
    """
    config = read_config(folder)
    source = backbone or config.backbone
    compressed, peft_model = build(source, config.lora, config.reducer, config.routing, config.stage2)
    check_identity(config.identity, identify(compressed.family, source))
    for adapter in peft_model.peft_config:
        set_peft_model_state_dict(peft_model, lora_tensors(folder, peft_model, adapter), adapter_name=adapter)
    if OUTPUT_ADAPTER not in peft_model.peft_config and (folder / OUTPUT_ADAPTER).exists():
        raise ValueError(f"{folder} holds {OUTPUT_ADAPTER}/, but its {CONFIG_FILE} names no output LoRA")
    routers = _router_tensors(compressed)
    if routers:
        assert compressed.bank is not None
        compressed.bank.load_state_dict(read_exactly(folder / ROUTER_FILE, routers))
    elif (folder / ROUTER_FILE).exists():
        raise ValueError(f"{folder} holds {ROUTER_FILE}, but its {CONFIG_FILE} names no router: the files disagree")
    compressed.eval()
    return config, compressed, peft_model


def lora_tensors(folder: Path, peft_model: PeftModel, adapter: str = MAIN_ADAPTER) -> dict[str, Tensor]:
    """The tensors of one of a folder's LoRAs, which must fit ``peft_model``'s exactly."""
    expected = get_peft_model_state_dict(peft_model, adapter_name=adapter, save_embedding_layers=False)
    return read_exactly((folder if adapter == MAIN_ADAPTER else folder / adapter) / LORA_FILE, expected)


def _stage2_config(adapter: str, output_lora: dict[str, Any] | None) -> Stage2Config:
    return Stage2Config(adapter, None if output_lora is None else LoraSettings(**output_lora))


def _router_tensors(backbone: CompressedBackbone) -> dict[str, Tensor]:
    """The routers' tensors; empty for token-only arms and router-free selectors."""
    if backbone.bank is None:
        return {}
    return {name: tensor.contiguous() for name, tensor in backbone.bank.state_dict().items()}
