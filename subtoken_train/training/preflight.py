"""Work out what a recipe trains, for how long, on which prompt and devices, before weights are loaded."""

import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from subtoken_train.datasets.datamodule import CorpusDataModule, RecallDataModule
from subtoken_train.datasets.ordered import OrderedDataModule
from subtoken_train.engine.build import start_warm
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import in_a_recipe, refuse
from subtoken_train.families.backbone_config import BackboneConfig, is_hub_id
from subtoken_train.families.family import Family
from subtoken_train.families.load import layout_family, with_processor
from subtoken_train.functional.objective import answer_loss
from subtoken_train.ledger.kv_budget import KVBudget
from subtoken_train.ledger.ledger import Anchor, Entry, Ledger, solve_anchor, staged_anchor
from subtoken_train.reducers.base import Reducer, matched_reducer
from subtoken_train.training.module import SubTokenModule
from subtoken_train.types import Batch


def count_devices(devices: int | str | list[int], accelerator: str, num_nodes: int) -> int:
    """Count a run's processes by the trainer's settings; ``auto`` and -1 count what this machine has."""
    if accelerator == "cpu" and devices != "auto" and (isinstance(devices, list) or not str(devices).isdecimal()):
        raise ValueError(f"trainer.devices is {devices!r}; on a CPU it is a count of processes, or auto")
    chosen = list(filter(None, devices.split(","))) if isinstance(devices, str) and "," in devices else devices
    if isinstance(chosen, list):
        return len(chosen) * num_nodes
    if chosen in ("auto", "-1", -1):
        return num_nodes * (1 if accelerator == "cpu" else max(1, torch.cuda.device_count()))
    return int(chosen) * num_nodes


def check_devices(devices: int | str | list[int], accelerator: str) -> None:
    """Raise ``ValueError`` if a node's processes are more than its GPUs (or, on a CPU, its cores)."""
    if accelerator in ("gpu", "cuda"):
        there, name = torch.cuda.device_count(), "GPU(s)"
    elif accelerator == "cpu":
        there, name = os.cpu_count() or 1, "CPU core(s)"
    else:
        return
    if (wanted := count_devices(devices, accelerator, num_nodes=1)) > there:
        has = f"this machine has {there} {name}; lower trainer.devices, or choose another trainer.accelerator"
        raise ValueError(f"trainer.devices asks for {wanted} process(es), but {has}")


class NominalPrompt(NamedTuple):
    """Prompt that a pre-flight assumes: words, compressed region (``visual``, ``context``), tokens of each region."""

    title: str
    note: str
    region: str
    regions: dict[str, int]

    @property
    def tokens(self) -> int:
        """Tokens of the compressed region."""
        return self.regions[self.region]


def nominal_prompt(family: Family, data: OrderedDataModule[Any]) -> NominalPrompt:
    """Return one image and as many text tokens as the paper's; for a language model a block of the recipe's corpus."""
    text, images = isinstance(data, CorpusDataModule | RecallDataModule), family.image_token_id is not None
    refuse((images and text, f"{family.name} reads images, but data names text without any; set data.train_file"))
    if not images and not text:
        kind = family.model.config.model_type
        raise ValueError(f"{kind} is a language model, but data names records of images; name a corpus in data.train")
    if isinstance(data, RecallDataModule):
        regions = {"context": data.context_length}
        return NominalPrompt("KV budget of a context", f"{data.context_length:,} context tokens", "context", regions)
    if isinstance(data, CorpusDataModule):
        regions = {"context": data.context_length, "query": data.block_length - data.context_length}
        note = f"{regions['context']:,} context + {regions['query']:,} query tokens"
        return NominalPrompt("KV budget of a block of text", note, "context", regions)
    words = family.nominal_text
    counts = " + ".join(f"{count} {region}" for region, count in words.items())
    as_in = "as in the paper" if words == family.paper_text else "as in the paper, but for the chat format"
    note = f"{sum(words.values())} text tokens {as_in} ({counts}), no answer"
    regions = {"system": words["system"], "visual": family.visual_tokens(), "query": words["query"]}
    return NominalPrompt("KV budget of a prompt with one image", note, "visual", regions)


class LayerBand(NamedTuple):
    """Neighbouring layers whose ledger rows are equal: first and last layer, and the rows of one of them."""

    first: int
    last: int
    rows: tuple[Entry, ...]


def check_bytes(parts: CompressedBackbone, prompt: NominalPrompt) -> None:
    """Raise a worded ``ValueError`` where a layer's byte budget is less than what it must keep of the prompt."""
    if parts.bank is not None:
        shape = parts.family.shape
        for tokens in set(parts.reducer.layer_tokens(prompt.tokens, shape.num_layers)):
            parts.bank.config.check_tokens(shape, tokens)


def budget_of(parts: CompressedBackbone) -> KVBudget:
    """Keep ratio and groups; without routing, every group."""
    return replace(parts.group_budget, keep_ratio=parts.reducer.keep_ratio)


def layer_bands(ledger: Ledger) -> list[LayerBand]:
    """Return the ledger's rows, with equal neighbouring layers taken together."""
    layers = [tuple(rows) for _, rows in groupby(ledger.entries, key=lambda entry: entry.layer)]
    alike = [list(members) for _, members in groupby(layers, lambda rows: [replace(row, layer=0) for row in rows])]
    return [LayerBand(members[0][0].layer, members[-1][0].layer, members[0]) for members in alike]


def equal_bytes_anchor(parts: CompressedBackbone, prompt: NominalPrompt) -> Anchor:
    """Return the token-only arm, cut at the same layers, with the bytes that the recipe really keeps of the region."""
    layers = parts.family.shape.num_layers
    return _staged(parts, prompt, matched_reducer(parts.reducer, parts.group_budget, layers, prompt.tokens))


def nominal_anchor(parts: CompressedBackbone, prompt: NominalPrompt) -> Anchor:
    """Return the anchor for the paper's fraction r (1 + K/S) / 2 of *all* layers."""
    shape, reducer, share = parts.family.shape, parts.reducer, budget_of(parts).total_of(prompt.tokens)
    if reducer.staged:
        return _staged(parts, prompt, reducer.at_share(share, shape.num_layers))
    return solve_anchor(shape, prompt.tokens, share, parts.cut_layer, prompt.region)


def _staged(parts: CompressedBackbone, prompt: NominalPrompt, config: Reducer) -> Anchor:
    counts = config.layer_tokens(prompt.tokens, parts.family.shape.num_layers)
    return staged_anchor(parts.family.shape, prompt.tokens, counts, config.keep_ratio, prompt.region)


class ParameterGroup(NamedTuple):
    """Some of a model's tensors: how many, and their elements."""

    name: str
    tensors: int
    parameters: int


class StepPlan(NamedTuple):
    """Optimiser steps of a run (None where only the data could tell and it was not read), and passes over the data."""

    steps: int | None
    samples_per_step: int
    epochs: float | None


@in_a_recipe
def lay_out(module: SubTokenModule, offline: bool = False) -> CompressedBackbone:
    """Lay out what a module builds, without weights; what it starts from is read and checked, but if ``offline``."""
    family = layout_family(module.backbone_config)
    first = None if offline else module.read_first_stage()
    with torch.device("meta"):
        parts, peft_model = module.lay_out(family)
    if first is not None:
        first.tensors(family, module.backbone_config, peft_model)
    if not offline:
        start_warm(parts)
    return parts


def lora_groups(parts: CompressedBackbone, trained: bool = True) -> list[ParameterGroup]:
    """Return the LoRA that trains (or stage 1's, which does not) on q, v and, if there is one, the output."""
    named = [(name, each) for name, each in parts.model.named_parameters() if ".lora_" in name]
    sides = ("q_proj", "v_proj", "qkv_proj", "o_proj")
    groups = [count_group(f"LoRA {side}", (p for name, p in named if f".{side}." in name), trained) for side in sides]
    return [group for group in groups if group.tensors]


def count_group(name: str, parameters: Iterable[nn.Parameter], trained: bool) -> ParameterGroup:
    """Count those of some parameters that train, or those that do not."""
    sizes = [parameter.numel() for parameter in parameters if parameter.requires_grad == trained]
    return ParameterGroup(name, len(sizes), sum(sizes))


def plan_steps(
    samples_per_step: int, max_steps: int, max_epochs: int | None, batches: int | None, accumulate: int
) -> StepPlan:
    """Plan steps and epochs; -1 (or None): no limit. ``batches``: of an epoch and device; None: data was not read."""
    if batches is None:
        return StepPlan(max_steps if max_steps >= 0 else None, samples_per_step, None)
    per_epoch = math.ceil(batches / accumulate)
    by_epochs = -1 if max_epochs is None or max_epochs < 0 else max_epochs * per_epoch
    steps = min((limit for limit in (max_steps, by_epochs) if limit >= 0), default=None)
    return StepPlan(steps, samples_per_step, None if steps is None else steps / per_epoch)


def at_hand(family: Family, backbone: BackboneConfig) -> Family | None:
    """Return a layout with its tokenizer and image processor; None if the Hub has these and they are not at hand."""
    try:
        return with_processor(family, backbone)
    except ValueError:
        if is_hub_id(backbone.path):
            return None
        raise


def seconds_per_batch(module: SubTokenModule, batches: Iterator[Batch]) -> float | None:
    """Measure the mean seconds from reading a batch to its gradients, on the CPU, without the first; None: no batch."""
    module.parts.train()
    times = [time.perf_counter()]
    for batch in batches:
        with torch.enable_grad():
            _, _, targets, logits = module.answered(batch)
            torch.autograd.backward(answer_loss(logits, targets))
        times.append(time.perf_counter())
    measured = times[1:] if len(times) > 2 else times
    return (measured[-1] - measured[0]) / (len(measured) - 1) if len(times) > 1 else None
