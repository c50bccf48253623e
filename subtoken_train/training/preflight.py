"""What a recipe trains and for how long, computed before anything is loaded (architecture on the meta device)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from subtoken_train.datasets.collate import EncodedSample, encode
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.unknown_tokens import spread
from subtoken_train.datasets.video_sources import open_picture
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import MAX_TOKENS
from subtoken_train.families.backbone_config import BackboneConfig, is_hub_id
from subtoken_train.families.family import Family
from subtoken_train.families.load import layout_family, with_processor
from subtoken_train.training.module import SubTokenModule


@dataclass(frozen=True)
class ParameterGroup:
    """Some of a model's tensors: how many, and their elements."""

    name: str
    tensors: int
    parameters: int


@dataclass(frozen=True)
class StepPlan:
    """How many optimiser steps a run takes, and on how much data.

    Attributes:
        steps: optimiser steps; None where only the data could tell and it was not read.
        samples_per_step: records of one optimiser step: batch x accumulation x devices.
        epochs: passes over the data; None without data.
    """

    steps: int | None
    samples_per_step: int
    epochs: float | None


def lay_out(module: SubTokenModule, offline: bool = False) -> CompressedBackbone:
    """Everything a module builds, without weights; wrong settings are the usual worded ``ValueError``.

    What stage 2 starts from is read and checked; with ``offline`` the recipe's LoRA settings are taken for stage 1's.
    """
    family = layout_family(module.backbone_config)
    first = None if offline else module.read_first_stage()
    with torch.device("meta"):
        parts, peft_model = module.lay_out(family)
    if first is not None:
        first.tensors(family, module.backbone_config, peft_model)
    return parts


def lora_groups(parts: CompressedBackbone, trained: bool = True) -> list[ParameterGroup]:
    """The LoRA that trains (or stage 1's, which does not) on q, v and the output projection, where there is any."""
    lora = {
        name: parameter
        for name, parameter in parts.model.named_parameters()
        if ".lora_" in name and parameter.requires_grad == trained
    }
    sides = ("q_proj", "v_proj", "o_proj")
    groups = [_count(f"LoRA {side}", (p for name, p in lora.items() if f".{side}." in name)) for side in sides]
    return [group for group in groups if group.tensors]


def trained_groups(parts: CompressedBackbone) -> list[ParameterGroup]:
    """The LoRA that trains, and the routers where there are any."""
    groups = lora_groups(parts)
    if parts.bank is not None and parts.bank.learned:
        groups.append(
            _count(f"routers ({parts.bank.config.selector})", (p for p in parts.bank.parameters() if p.requires_grad))
        )
    return groups


def frozen_group(parts: CompressedBackbone) -> ParameterGroup:
    """All that stays as it was."""
    return _count("frozen", (parameter for parameter in parts.parameters() if not parameter.requires_grad))


def plan_steps(
    samples_per_step: int, max_steps: int, max_epochs: int | None, batches: int | None, accumulate: int
) -> StepPlan:
    """Optimiser steps and epochs.

    Args:
        samples_per_step: records of one optimiser step.
        max_steps: the trainer's limit; -1: none.
        max_epochs: the trainer's limit; None or -1: none.
        batches: full batches per device in an epoch, at least one; None where the data was not read.
        accumulate: batches of one optimiser step.
    """
    if batches is None:
        return StepPlan(max_steps if max_steps >= 0 else None, samples_per_step, None)
    per_epoch = math.ceil(batches / accumulate)
    by_epochs = -1 if max_epochs is None or max_epochs < 0 else max_epochs * per_epoch
    steps = min((limit for limit in (max_steps, by_epochs) if limit >= 0), default=None)
    return StepPlan(steps, samples_per_step, None if steps is None else steps / per_epoch)


def at_hand(family: Family, backbone: BackboneConfig) -> Family | None:
    """A layout with its tokenizer and image processor; None where the Hub has these and they are not at hand.

    Raises:
        ValueError: a folder's cannot be read.
    """
    try:
        return with_processor(family, backbone)
    except ValueError:
        if is_hub_id(backbone.path):
            return None
        raise


def first_sample(
    family: Family, records: InstructionRecords, max_length: int, max_pixels: int, max_frames: int
) -> EncodedSample:
    """The first record as the loss sees it, by a family with its processor; its images as ``open_picture`` does."""
    record = records[0]
    images = [open_picture(source, record.id, max_pixels, max_frames) for source in record.images]
    return encode(record, family, max_length, images)


@dataclass(frozen=True)
class SampleLengths:
    """How long some records are.

    Attributes:
        tokens: of each.
        needed: those that no cut may reach, see ``EncodedSample.needed``.
        broken: what is wrong with the others, an image that cannot be read for instance.
    """

    tokens: list[int]
    needed: list[int]
    broken: list[str]


def sample_lengths(
    family: Family, records: InstructionRecords, most: int, max_pixels: int, max_frames: int
) -> SampleLengths:
    """Encode ``most`` records, spread over the file, whole; their images are opened, see ``open_picture``."""
    found = SampleLengths([], [], [])
    for place in spread(len(records), most):
        try:
            record = records[place]
            images = [open_picture(source, record.id, max_pixels, max_frames) for source in record.images]
            sample = encode(record, family, MAX_TOKENS, images)
        except ValueError as error:
            found.broken.append(str(error))
            continue
        found.tokens.append(len(sample.input_ids))
        found.needed.append(sample.needed)
    return found


def _count(name: str, parameters: Iterable[nn.Parameter]) -> ParameterGroup:
    sizes: Sequence[int] = [parameter.numel() for parameter in parameters]
    return ParameterGroup(name, len(sizes), sum(sizes))
