"""From trained tensors to what an adapter folder holds, on one process and without the backbone's weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from subtoken_train.artifact.config import AdapterConfig
from subtoken_train.artifact.folder import put_lora
from subtoken_train.artifact.identity import identify
from subtoken_train.families.family import Family
from subtoken_train.families.load import layout_family
from subtoken_train.training.checkpoints import read_marker, state_path
from subtoken_train.training.loss import CrossEntropy
from subtoken_train.training.module import FIRST_STAGE_KEY, SubTokenModule
from subtoken_train.training.trained_tensors import check_same_shapes, read_state, shapes_of, trained_tensors


def lay_out_checkpoint(module: SubTokenModule, checkpoint: Path) -> None:
    """Build ``module``'s parts around the tensors of a checkpoint folder; its backbone stays on the meta device.

    Stage 1's LoRA, which no checkpoint of stage 2 holds, is read from the folder that the recipe names. Routers below
    the reducer's cut, which never run and are not in a checkpoint either, are drawn from seed 0.
    """
    state = state_path(checkpoint)
    tensors, digest = trained_tensors(state), _noted(state, FIRST_STAGE_KEY)
    check_same_shapes(read_marker(checkpoint).trained, shapes_of(tensors), checkpoint)
    first = module.read_first_stage()
    family = layout_family(module.backbone_config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        compressed, peft_model = module.lay_out(family)
    if first is not None:
        put_lora(peft_model, first.tensors(family, module.backbone_config, peft_model))
        module.first_stage_digest = first.digest()
    module.check_first_stage(digest)
    module.compressed = compressed
    object.__setattr__(module, "peft_model", peft_model)  # as configure_model does
    check_same_shapes(shapes_of(module.trained()), shapes_of(tensors), checkpoint)
    own = {name.removeprefix("compressed."): tensor for name, tensor in tensors.items()}
    assert not compressed.load_state_dict(own, strict=False, assign=True).unexpected_keys
    compressed.eval()


def adapter_config(module: SubTokenModule, family: Family, training: dict[str, Any]) -> AdapterConfig:
    """Return a built module's ``subtoken_config.json``; stage 1, loss and distillation join ``training``."""
    if module.first_stage is not None:
        first = module.first_stage
        stage1 = {**first.config.training, "reading": first.reading, "sha256": module.first_stage_digest}
        training = {**training, "stage1": stage1}
    if module.distillation_config is not None:
        training = {**training, "distillation": asdict(module.distillation_config)}
    if module.loss.name != CrossEntropy.name:
        training = {**training, "loss": {"name": module.loss.name, **asdict(module.loss)}}
    return AdapterConfig(
        backbone=module.backbone_config,
        lora=module.lora_settings,
        reducer=module.reducer_config,
        routing=module.routing_config,
        identity=identify(family, module.backbone_config),
        stage2=module.stage2_config,
        training=training,
    )


def _noted(state: Path, key: str) -> Any:
    """Return what ``SubTokenModule.on_save_checkpoint`` noted in a state file or DeepSpeed's folder; None: nothing."""
    if not state.is_dir():
        return read_state(state).get(key)
    file = min(state.rglob("*_model_states.pt"), default=None)
    if file is None:
        raise ValueError(f"{state} is not a complete DeepSpeed checkpoint: it holds no *_model_states.pt")
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True).get(key)
