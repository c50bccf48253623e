"""What ``subtoken-train check`` prints, one function per step."""

from __future__ import annotations

from collections.abc import Iterator

from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import InstructionDataModule, RecallDataModule
from subtoken_train.engine.build import Stage2Config
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.lora import LoraSettings
from subtoken_train.ledger.kv_budget import entry_bytes
from subtoken_train.ledger.ledger import Anchor, Ledger
from subtoken_train.routing import RoutingConfig
from subtoken_train.training.activation_memory import Step
from subtoken_train.training.devices import count_devices
from subtoken_train.training.memory import estimate_memory
from subtoken_train.training.nominal_prompt import (
    LayerBand,
    NominalPrompt,
    budget_of,
    equal_bytes_anchor,
    layer_bands,
    nominal_anchor,
    prompt_ledger,
)
from subtoken_train.training.preflight import ParameterGroup, frozen_group, lora_groups, trained_groups

_OPTIMIZERS = {"adamw": "AdamW", "paged_adamw_8bit": "paged 8-bit AdamW"}
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def settings_lines(cli: RecipeCLI, parts: CompressedBackbone, prompt: NominalPrompt, offline: bool) -> Iterator[str]:
    """Backbone, reducer, routing, LoRA, stage 2 and optimiser, a line each."""
    module = cli.model
    backbone, optimizer = module.backbone_config, module.optimizer_config
    seen = f"{prompt.tokens:,} visual tokens per {_image_words(parts)}" if prompt.region == "visual" else "text only"
    quantised = "" if backbone.quantization == "none" else f" ({backbone.quantization} decoder)"
    yield (
        f"backbone   {backbone.path}, {backbone.dtype}{quantised}, {backbone.attention}, "
        f"{parts.family.shape.num_layers} layers, {seen}"
    )
    yield f"reducer    {_reducer_words(parts, prompt)}"
    yield f"routing    {_routing_words(module.routing_config)}"
    yield f"LoRA       {_lora_words(module.lora_settings)}"
    if module.stage2_config is not None:
        yield from _stage2_lines(module.stage2_config, offline)
    own_rate = optimizer.router_learning_rate
    routers = "" if own_rate is None else f" (routers {own_rate:g})"
    rate = f"{optimizer.learning_rate:g}{routers}"
    yield (
        f"optimiser  {_OPTIMIZERS[optimizer.name]} at {rate}, weight decay {optimizer.weight_decay:g}, "
        f"{optimizer.warmup_steps:,} warm-up steps, then {optimizer.schedule}"
    )
    checkpointing = "with" if module.gradient_checkpointing else "without"
    yield f"trainer    precision {cli.config.trainer.precision or '32-true'}, {checkpointing} gradient checkpointing"
    yield f"output     {cli.output_dir}"


def _image_words(parts: CompressedBackbone) -> str:
    size = parts.family.nominal_image
    return "image" if size is None else f"image of {size[0]} x {size[1]} pixels"


def _reducer_words(parts: CompressedBackbone, prompt: NominalPrompt) -> str:
    reducer = parts.reducer
    kept = f"{reducer.kept_tokens(prompt.tokens)} of {prompt.tokens}"
    return ", ".join(filter(None, [f"{reducer.name}, keeps {reducer.keep_ratio:g} ({kept})", reducer.words]))


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


def _lora_words(lora: LoraSettings) -> str:
    return f"rank {lora.rank}, alpha {lora.alpha}, dropout {lora.dropout:g}"


def _stage2_lines(stage2: Stage2Config, offline: bool) -> Iterator[str]:
    read = "not read: --offline; its LoRA is taken to be as above" if offline else "its LoRA, as above, is frozen"
    yield f"stage 2    on {stage2.adapter} ({read})"
    if stage2.output_lora is not None:
        yield f"o_proj     LoRA {_lora_words(stage2.output_lora)}"


def training_lines(parts: CompressedBackbone) -> Iterator[str]:
    """The table of trained tensors, and how much stays frozen."""
    lora, frozen, first_stage = lora_groups(parts), frozen_group(parts), lora_groups(parts, trained=False)
    groups = trained_groups(parts)
    trained = _sum_of("trained", groups)
    together = [_sum_of("LoRA together", lora)] if len(lora) > 1 else []
    of_frozen = [_sum_of("of it stage 1's LoRA", first_stage)] if first_stage else []
    yield f"{'':<22}{'tensors':>8}{'parameters':>16}"
    for group in (*lora, *together, *groups[len(lora) :], trained, frozen, *of_frozen):
        yield _parameter_line(group)
    yield f"trained share {_percent(trained.parameters / (trained.parameters + frozen.parameters))}"


def _sum_of(name: str, groups: list[ParameterGroup]) -> ParameterGroup:
    return ParameterGroup(name, sum(g.tensors for g in groups), sum(g.parameters for g in groups))


def _parameter_line(group: ParameterGroup) -> str:
    return f"{group.name:<22}{group.tensors:>8,}{group.parameters:>16,}"


def budget_lines(parts: CompressedBackbone, prompt: NominalPrompt) -> Iterator[str]:
    """The ledger by layer and region, its totals, and the token-only arm of equal bytes."""
    ledger = prompt_ledger(parts, prompt)
    dtype = str(parts.family.model.dtype).removeprefix("torch.")
    yield f"{prompt.note}; bytes of one layer, {dtype}"
    yield f"{'':<16}{'region':<9}{'tokens':>7}{'kept':>6}{'keys B':>12}{'values B':>12}{'index B':>9}{'KV':>12}"
    for band in layer_bands(ledger):
        yield from _band_lines(band, entry_bytes(ledger.shape))
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
    """The prediction by purpose; training/memory.py has the formulas."""
    if isinstance(cli.datamodule, RecallDataModule):
        yield "a sample is taken to be twice as long as its context"
    step = training_step(cli, parts, prompt)
    estimate = estimate_memory(parts, step)
    before, after = estimate.rows
    held = "this device" if step.processes == 1 else f"each of {step.processes} devices"
    yield f"{step.batch_size} records of {before:,} tokens ({after:,} after the reducer), on {held}"
    for name, size in (*estimate.parts, ("peak", estimate.total)):
        yield f"{name:<18}{_size(size):>12}"
    yield "live tensors; a GPU's context, libraries and allocator take about 1 GB more"


def training_step(cli: RecipeCLI, parts: CompressedBackbone, prompt: NominalPrompt) -> Step:
    """A recipe's step as far as its memory depends on it, with the longest records, every text token labelled."""
    data, trainer, module = cli.datamodule, cli.config.trainer, cli.model
    unlabelled, pixels = prompt.tokens, 0
    if isinstance(data, InstructionDataModule):
        length, pixels = data.max_length, parts.family.image_bytes()
    elif isinstance(data, CorpusDataModule):
        length, unlabelled = data.block_length, data.context_length + data.prefix_tokens
    else:
        length = 2 * prompt.tokens
    return Step(
        batch_size=data.batch_size,
        length=length,
        compressed=prompt.tokens,
        labelled=length - unlabelled,
        pixel_bytes=pixels,
        checkpointing=module.gradient_checkpointing,
        autocast=str(trainer.precision).endswith("-mixed"),
        dropout=module.lora_settings.dropout > 0,
        on_cpu=trainer.accelerator == "cpu",
        quantization=module.backbone_config.quantization,
        optimizer=module.optimizer_config.name,
        strategy=str(trainer.strategy),
        processes=count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes),
    )
