"""What ``subtoken-train check`` prints, one function per step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

from subtoken_train.backbones.attach import CompressedBackbone
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.datasets.corpus import load_rows
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.datasets.recall_datamodule import RecallDataModule
from subtoken_train.datasets.records import InstructionRecords
from subtoken_train.datasets.sampler import ResumableSampler
from subtoken_train.functional.ledger import Anchor, Ledger
from subtoken_train.routing import RoutingConfig
from subtoken_train.training.memory import estimate_memory
from subtoken_train.training.preflight import (
    LayerBand,
    NominalPrompt,
    ParameterGroup,
    budget_of,
    count_devices,
    equal_bytes_anchor,
    first_sample,
    frozen_group,
    layer_bands,
    nominal_anchor,
    plan_steps,
    prompt_ledger,
    trained_groups,
)
from subtoken_train.types import Region

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def settings_lines(cli: RecipeCLI, parts: CompressedBackbone, prompt: NominalPrompt) -> Iterator[str]:
    """Backbone, reducer, routing, LoRA and optimiser, a line each."""
    module = cli.model
    backbone, lora, optimizer = module.backbone_config, module.lora_settings, module.optimizer_config
    seen = f"{prompt.tokens:,} visual tokens per {_image_words(parts)}" if prompt.region == "visual" else "text only"
    yield (
        f"backbone   {backbone.path}, {backbone.dtype}, {backbone.attention}, {parts.family.shape.num_layers} layers, "
        f"{seen}"
    )
    yield f"reducer    {_reducer_words(parts, prompt)}"
    yield f"routing    {_routing_words(module.routing_config)}"
    yield f"LoRA       rank {lora.rank}, alpha {lora.alpha}, dropout {lora.dropout:g}"
    own_rate = optimizer.router_learning_rate
    routers = "" if own_rate is None else f" (routers {own_rate:g})"
    yield (
        f"optimiser  AdamW at {optimizer.learning_rate:g}{routers}, weight decay {optimizer.weight_decay:g}, "
        f"{optimizer.warmup_steps:,} warm-up steps, then {optimizer.schedule}"
    )
    checkpointing = "with" if module.gradient_checkpointing else "without"
    yield f"trainer    precision {cli.config.trainer.precision or '32-true'}, {checkpointing} gradient checkpointing"
    yield f"output     {cli.output_dir}"


def _image_words(parts: CompressedBackbone) -> str:
    size = parts.family.nominal_image
    return "image" if size is None else f"image of {size[0]} x {size[1]} pixels"


def _reducer_words(parts: CompressedBackbone, prompt: NominalPrompt) -> str:
    config = parts.reducer.config
    own = {
        "fastv": f", stage {config.stage}, L_f={config.layer}",
        "quest": f", pages of {config.page_size}, window {config.window}",
    }
    kept = f"{parts.reducer.kept_tokens(prompt.tokens)} of {prompt.tokens}"
    return f"{config.name}, keeps {config.keep_ratio:g} ({kept}){own.get(config.name, '')}"


def _routing_words(config: RoutingConfig | None) -> str:
    if config is None:
        return "none, a token-only arm"
    query = ", query-conditioned" if config.query_conditioned else ""
    prior = "" if config.score_prior == "none" else f"{config.score_prior} prior, "
    gate = "value gate, " if config.value_gate else ""
    return (
        f"{config.selector}{query}, S={config.num_groups}, K={config.kept_groups}, {config.layout}, "
        f"{config.budget} budget, {prior}{gate}balance weight {config.balance_weight:g}"
    )


def training_lines(parts: CompressedBackbone) -> Iterator[str]:
    """The table of trained tensors, and how much stays frozen."""
    groups, frozen = trained_groups(parts), frozen_group(parts)
    trained = ParameterGroup("trained", sum(g.tensors for g in groups), sum(g.parameters for g in groups))
    lora = ParameterGroup("LoRA together", sum(g.tensors for g in groups[:2]), sum(g.parameters for g in groups[:2]))
    yield f"{'':<22}{'tensors':>8}{'parameters':>16}"
    for group in (*groups[:2], lora, *groups[2:], trained, frozen):
        yield _parameter_line(group)
    yield f"trained share {_percent(trained.parameters / (trained.parameters + frozen.parameters))}"


def _parameter_line(group: ParameterGroup) -> str:
    return f"{group.name:<22}{group.tensors:>8,}{group.parameters:>16,}"


def budget_lines(parts: CompressedBackbone, prompt: NominalPrompt) -> Iterator[str]:
    """The ledger by layer and region, its totals, and the token-only arm of equal bytes."""
    ledger = prompt_ledger(parts, prompt)
    dtype = str(parts.family.model.dtype).removeprefix("torch.")
    yield f"{prompt.note}; bytes of one layer, {dtype}"
    yield f"{'':<16}{'region':<9}{'tokens':>7}{'kept':>6}{'keys B':>12}{'values B':>12}{'index B':>9}{'KV':>12}"
    for band in layer_bands(ledger):
        yield from _band_lines(band, 2 * ledger.shape.side_bytes)
    yield _total_line(f"{prompt.region} region", ledger, prompt.region)
    yield _total_line("whole prompt", ledger, None)
    if parts.bank is None:
        yield "matched anchor: none, this arm routes nothing"
        return
    yield f"matched anchor: {_anchor_words(equal_bytes_anchor(parts, ledger, prompt), prompt)}"
    if parts.reducer.cut_layer:
        yield _nominal_anchor_line(parts, prompt)


def _band_lines(band: LayerBand, dense_token_bytes: int) -> Iterator[str]:
    """The rows of one layer of a band; only the first names the layers."""
    label = f"layers {band.first}-{band.last}" if band.last > band.first else f"layer {band.first}"
    for row in band.rows:
        share = _percent(row.payload_bytes / (dense_token_bytes * row.tokens_before))
        yield (
            f"{label:<16}{row.region:<9}{row.tokens_before:>7,}{row.tokens:>6,}{row.key_bytes:>12,}"
            f"{row.value_bytes:>12,}{row.index_bytes:>9,}{share:>12}"
        )
        label = ""


def _total_line(name: str, ledger: Ledger, region: str | None) -> str:
    payload, dense = ledger.bytes_of(region, with_index=False), ledger.dense_bytes(region)
    index = ledger.bytes_of(region) - payload
    note = f" (and {_size(index)} of group indices)" if index else ""
    return f"{name}: {_size(payload)} of {_size(dense)}, {_percent(payload / dense)}{note}"


def _nominal_anchor_line(parts: CompressedBackbone, prompt: NominalPrompt) -> str:
    """Decoder-stage reducers keep every token below the cut: what that makes of the paper's nominal fraction."""
    nominal = f"at the nominal {_percent(budget_of(parts).total_kv_fraction)} of all layers"
    try:
        return f"{nominal}: {_anchor_words(nominal_anchor(parts, prompt), prompt)}"
    except ValueError as error:
        return f"{nominal}: {error}"


def _anchor_words(anchor: Anchor, prompt: NominalPrompt) -> str:
    return (
        f"{anchor.kept_tokens} of {anchor.tokens} {prompt.region} tokens, every group "
        f"(keep_ratio {anchor.keep_ratio:g}), {_percent(anchor.fraction)}"
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.6g} %"


def _size(num_bytes: int) -> str:
    unit, name = next((u for u in _UNITS if num_bytes >= u[0]), _UNITS[-1])
    return f"{num_bytes / unit:,.2f} {name}"


def memory_lines(cli: RecipeCLI, parts: CompressedBackbone, prompt: NominalPrompt) -> Iterator[str]:
    """The estimate by purpose; training/memory.py has the formula."""
    data, checkpointing = cli.datamodule, cli.model.gradient_checkpointing
    length = data.max_length if isinstance(data, InstructionDataModule) else 2 * prompt.tokens
    estimate = estimate_memory(parts, data.batch_size, length, checkpointing, prompt.tokens)
    before, after = estimate.rows
    yield f"{data.batch_size} records of {before:,} tokens ({after:,} after the reducer); every device holds all of it"
    for name, size in (*estimate.parts, ("sum", estimate.total)):
        yield f"{name:<16}{_size(size):>12}"


def data_lines(cli: RecipeCLI, parts: CompressedBackbone, offline: bool) -> Iterator[str]:
    """The files (unless offline), the first record as the loss sees it, optimiser steps, records and epochs."""
    data, trainer = cli.datamodule, cli.config.trainer
    devices = count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes)
    accumulate = trainer.accumulate_grad_batches
    batches = None
    if isinstance(data, CorpusDataModule):
        yield from _corpus_lines(data, offline)
    elif isinstance(data, RecallDataModule):
        yield f"{data.train_samples:,} samples of {data.num_facts} facts, {data.num_questions} asked, drawn as needed"
    elif offline:
        yield f"{data.train_file} (not read: --offline)"
    else:
        records = yield from _record_lines(cli, parts)
        batches = ResumableSampler(records, data.batch_size, data.seed, world_size=devices).batches_per_pass
    plan = plan_steps(
        data.batch_size * accumulate * devices, trainer.max_steps, trainer.max_epochs, batches, accumulate
    )
    yield (
        f"{plan.samples_per_step:,} records per optimiser step: batch {data.batch_size} x accumulation {accumulate} x "
        f"{devices} device{'s' if devices > 1 else ''}"
    )
    if plan.steps is None:
        yield "optimiser steps: trainer.max_steps is not set; trainer.max_epochs and the data decide"
        return
    passes = "" if plan.epochs is None else f", {plan.epochs:.2f} epochs"
    yield f"{plan.steps:,} optimiser steps, {plan.steps * plan.samples_per_step:,} records{passes}"


def _corpus_lines(data: CorpusDataModule, offline: bool) -> Iterator[str]:
    """Where the text comes from and how a block is laid out; it is tokenised when training starts."""
    source, prefix = data.train_source, data.prefix_tokens
    name = source.name if source.config is None else f"{source.name}, {source.config}"
    rows = "not read: --offline" if offline else f"{_number_of(load_rows(source, data.streaming))}"
    yield f"{name}, split {source.split} ({rows})"
    reads = f"{prefix} read without loss, {data.block_length - data.context_length - prefix} predicted"
    region = reads if prefix else "all of it read and predicted: choices look ahead (the region reading)"
    yield f"blocks of {data.block_length:,} tokens: {data.context_length:,} of context, then {region}"


def _number_of(rows: Any) -> str:
    return f"{len(rows):,} rows" if hasattr(rows, "__len__") else "streamed"


def _record_lines(cli: RecipeCLI, parts: CompressedBackbone) -> Generator[str, None, int]:
    """Parse the files and encode the first record; returns the number of training records."""
    data = cli.datamodule
    records = InstructionRecords(data.train_file, data.image_folder)
    yield f"{data.train_file}: {len(records):,} records"
    if data.val_file is not None:
        yield f"{data.val_file}: {len(InstructionRecords(data.val_file, data.image_folder)):,} records for validation"
    sample = first_sample(parts.family, cli.model.backbone_config, records, data.max_length)
    if sample is None:
        yield f"first record not encoded: the processor of {cli.model.backbone_config.path} is not at hand"
    else:
        counts = ", ".join(f"{sample.regions.count(r)} {r.label}" for r in Region if r in sample.regions)
        yield f"first record {sample.record_id!r}: {len(sample.input_ids)} tokens ({counts})"
    return len(records)
