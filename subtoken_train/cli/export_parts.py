"""What an exported folder is made of: configuration, parts and LoRA of its source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peft import PeftModel, get_peft_model_state_dict

from subtoken_train.artifact.config import AdapterConfig, read_config
from subtoken_train.artifact.folder import put_lora, read_adapter
from subtoken_train.cli.export_source import Source
from subtoken_train.engine.build import build
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.training.adapter_parts import adapter_config, lay_out_checkpoint
from subtoken_train.training.checkpoints import read_marker


def backbone_of(source: Source, cli: Any) -> str:
    """The name of the backbone that a source was trained on."""
    return read_config(source.folder).backbone.path if source.is_adapter else str(cli.model.backbone_config.path)


def read_parts(source: Source, cli: Any, backbone: str | None) -> tuple[AdapterConfig, CompressedBackbone, PeftModel]:
    """Configuration, parts and LoRA of a source, its backbone on the meta device and named ``backbone`` if given."""
    if source.is_adapter:
        named = read_config(source.folder).backbone
        if backbone is not None:
            named = replace(named, path=backbone, revision=None)
        config, parts, peft_model = read_adapter(source.folder, named, layout=True)
        if peft_model is None:
            raise ValueError(f"{source.folder} is merged and holds no LoRA; export what it was merged from")
        identity = replace(config.identity, path=named.path, revision=named.revision)
        return replace(config, backbone=named, identity=identity), parts, peft_model
    module = cli.model
    if backbone is not None:
        module.backbone_config = replace(module.backbone_config, path=backbone, revision=None)
    lay_out_checkpoint(module, source.folder)
    assert source.recipe is not None
    steps, seed = read_marker(source.folder).step, cli.config.seed_everything
    config = adapter_config(module, module.family, {"name": source.recipe.parent.name, "steps": steps, "seed": seed})
    return config, module.parts, module.peft_model


def with_weights(
    config: AdapterConfig, parts: CompressedBackbone, peft_model: PeftModel
) -> tuple[CompressedBackbone, PeftModel]:
    """The same adapter on the loaded backbone."""
    loaded, loaded_peft = build(config.backbone, config.lora, config.reducer, config.routing, config.stage2)
    for adapter in peft_model.peft_config:
        tensors = get_peft_model_state_dict(peft_model, adapter_name=adapter, save_embedding_layers=False)
        put_lora(loaded_peft, tensors, adapter)
    if loaded.bank is not None and parts.bank is not None:
        loaded.bank.load_state_dict(parts.bank.state_dict())
    return loaded, loaded_peft
