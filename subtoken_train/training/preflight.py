"""What a recipe trains, keeps and needs, computed before anything is loaded (architecture on the meta device)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Any

import torch
from torch import nn

from subtoken_train.datasets.collate import EncodedSample, encode
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import RecallDataModule
from subtoken_train.datasets.ordered import OrderedDataModule
from subtoken_train.datasets.records import InstructionRecords, open_image
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.family import Family
from subtoken_train.families.load import layout_family, with_processor
from subtoken_train.ledger.kv_budget import KVBudget
from subtoken_train.ledger.ledger import Anchor, Entry, Ledger, nominal_ledger, solve_anchor
from subtoken_train.training.module import SubTokenModule


@dataclass(frozen=True)
class NominalPrompt:
    """What a pre-flight takes for a prompt.

    Attributes:
        title: the prompt in words.
        note: how its text is made up.
        region: the region that reducer and routers compress, ``visual`` or ``context``.
        regions: tokens of each region before reduction.
    """

    title: str
    note: str
    region: str
    regions: dict[str, int]

    @property
    def tokens(self) -> int:
        """Tokens of the compressed region."""
        return self.regions[self.region]


def nominal_prompt(family: Family, data: OrderedDataModule[Any]) -> NominalPrompt:
    """One image and as many text tokens as the paper's; for a language model a block of the recipe's corpus."""
    if family.image_token_id is not None and isinstance(data, CorpusDataModule | RecallDataModule):
        raise ValueError(
            f"{family.name} reads images, but data names text without any; name instruction records in data.train_file"
        )
    if isinstance(data, RecallDataModule):
        regions = {"context": data.context_length}
        return NominalPrompt("KV budget of a context", f"{data.context_length:,} context tokens", "context", regions)
    if isinstance(data, CorpusDataModule):
        regions = {"context": data.context_length, "query": data.block_length - data.context_length}
        note = f"{regions['context']:,} context + {regions['query']:,} query tokens"
        return NominalPrompt("KV budget of a block of text", note, "context", regions)
    if family.image_token_id is None:
        raise ValueError(
            f"{family.model.config.model_type} is a language model, but data names instruction records; name a corpus "
            "in data.train (recipes/llama7b_quest25_s8k7.yaml shows one)"
        )
    words = family.paper_text
    text = " + ".join(f"{count} {region}" for region, count in words.items())
    note = f"{sum(words.values())} text tokens as in the paper ({text}), no answer"
    regions = {"system": words["system"], "visual": family.visual_tokens(), "query": words["query"]}
    return NominalPrompt("KV budget of a prompt with one image", note, "visual", regions)


@dataclass(frozen=True)
class ParameterGroup:
    """Some of a model's tensors: how many, and their elements."""

    name: str
    tensors: int
    parameters: int


@dataclass(frozen=True)
class LayerBand:
    """Neighbouring layers whose ledger rows are equal: first and last layer, and the rows of one of them."""

    first: int
    last: int
    rows: tuple[Entry, ...]


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


def prompt_ledger(parts: CompressedBackbone, prompt: NominalPrompt) -> Ledger:
    """Nominal cache of a prompt."""
    kept = parts.reducer.kept_tokens(prompt.tokens)
    return nominal_ledger(parts.family.shape, prompt.regions, budget_of(parts), parts.reducer.cut_layer, kept)


def budget_of(parts: CompressedBackbone) -> KVBudget:
    """Keep ratio and groups; without routing, every group."""
    return replace(parts.group_budget, keep_ratio=parts.reducer.keep_ratio)


def layer_bands(ledger: Ledger) -> list[LayerBand]:
    """The ledger's rows, equal neighbouring layers taken together."""
    layers = [tuple(rows) for _, rows in groupby(ledger.entries, key=lambda entry: entry.layer)]
    bands = groupby(layers, key=lambda rows: [replace(row, layer=0) for row in rows])
    alike = [list(members) for _, members in bands]
    return [LayerBand(members[0][0].layer, members[-1][0].layer, members[0]) for members in alike]


def equal_bytes_anchor(parts: CompressedBackbone, ledger: Ledger, prompt: NominalPrompt) -> Anchor:
    """The token-only arm, cut at the same layer, with the bytes that the recipe really keeps of the region."""
    held = Fraction(ledger.bytes_of(prompt.region, with_index=False), ledger.dense_bytes(prompt.region))
    anchor = solve_anchor(ledger.shape, prompt.tokens, held, parts.reducer.cut_layer, prompt.region)
    if parts.reducer.stage != "context":
        return anchor
    # whole pages only
    config = replace(parts.reducer, keep_ratio=anchor.keep_ratio, round_up=True)
    kept = config.kept_tokens(prompt.tokens)
    return Anchor(prompt.tokens, kept, kept / prompt.tokens)


def nominal_anchor(parts: CompressedBackbone, prompt: NominalPrompt) -> Anchor:
    """The same for the paper's fraction r (1 + K/S) / 2 of *all* layers.

    Raises:
        ValueError: infeasible; the layers below the cut cost more alone.
    """
    target = budget_of(parts).exact_total
    return solve_anchor(parts.family.shape, prompt.tokens, target, parts.reducer.cut_layer, prompt.region)


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
    """A layout with its tokenizer and image processor; None where these are not at hand."""
    try:
        return with_processor(family, backbone)
    except (OSError, ValueError):
        return None


def first_sample(family: Family, records: InstructionRecords, max_length: int) -> EncodedSample:
    """The first record as the loss sees it, by a family with its processor."""
    record = records[0]
    images = [open_image(source, record.id) for source in record.images]
    return encode(record, family, max_length, images)


def _count(name: str, parameters: Iterable[nn.Parameter]) -> ParameterGroup:
    sizes: Sequence[int] = [parameter.numel() for parameter in parameters]
    return ParameterGroup(name, len(sizes), sum(sizes))
