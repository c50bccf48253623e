"""The lines of ``subtoken-train check`` on settings, parameters, KV bytes and memory, and the obstacles to a run.

``check_ready`` refuses what ``fit`` would refuse, without loading weights; ``machine_lines`` names what this machine
cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec

import torch
from lightning.pytorch.strategies import Strategy

from subtoken_train.artifact.hub import check_name, check_published
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.trainer_parts import KINDS, named_parts
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.datasets.recall_datamodule import RecallDataModule
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.lora import LoraSettings
from subtoken_train.ledger.kv_budget import entry_bytes
from subtoken_train.ledger.ledger import Anchor, Ledger
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.base import POOLS
from subtoken_train.training.loss import CrossEntropy
from subtoken_train.training.memory import Step, estimate_memory
from subtoken_train.training.preflight import (
    LayerBand,
    NominalPrompt,
    ParameterGroup,
    at_hand,
    budget_of,
    check_cpus,
    check_devices,
    count_devices,
    equal_bytes_anchor,
    frozen_group,
    layer_bands,
    lora_groups,
    nominal_anchor,
    prompt_ledger,
    trained_groups,
)
from subtoken_train.training.run_folder import RunFolder
from subtoken_train.training.strategies import PRESETS, check_kind, check_parts
from subtoken_train.training.strategies.zero import ZeroStrategy, zero_settings


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
    if not parts.reducer.fixed_count:
        yield "matched anchor: none, images keep different numbers of tokens; these bytes are the maximum"
        return
    yield f"matched anchor: {_words_of(prompt, partial(equal_bytes_anchor, parts, prompt))}"
    if parts.cut_layer:  # every token stays below the cut: what that makes of the paper's nominal fraction
        words = _words_of(prompt, partial(nominal_anchor, parts, prompt))
        yield f"at the nominal {_percent(budget_of(parts).total_kv_fraction)} of all layers: {words}"


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
    note = f" (and {size_words(index)} of group indices)" if index else ""
    return f"{name}: {size_words(payload)} of {size_words(dense)}, {_percent(payload / dense)}{note}"


def _words_of(prompt: NominalPrompt, solve: Callable[[], Anchor]) -> str:
    """An anchor in words, or why there is none."""
    try:
        anchor = solve()
    except ValueError as error:
        return str(error)
    return (
        f"{anchor.words} of {anchor.tokens} {prompt.region} tokens, every group "
        f"(keep_ratio {anchor.keep_ratio:g}), {_percent(anchor.fraction)}"
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.6g} %"


def size_words(num_bytes: int) -> str:
    """Return a number of bytes in the largest unit that it fills."""
    unit, name = next((u for u in ((2**30, "GiB"), (2**20, "MiB")) if num_bytes >= u[0]), (2**10, "KiB"))
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
        yield f"{name:<18}{size_words(size):>12}"
    yield "live tensors; a GPU's context, libraries and allocator take about 1 GB more"


def training_step(cli: RecipeCLI, parts: CompressedBackbone, prompt: NominalPrompt) -> Step:
    """A recipe's step as far as its memory depends on it, with the longest records, every text token labelled."""
    data, trainer, module = cli.datamodule, cli.config.trainer, cli.model
    unlabelled, pixels = prompt.tokens, 0
    if isinstance(data, InstructionDataModule):
        length, pixels = data.max_length, parts.family.image_bytes()
    elif isinstance(data, CorpusDataModule):
        length, unlabelled = data.block_length, data.context_length + data.prefix_tokens
        if data.train_source.documents == "conversations":  # a chat may have no context, and a short question
            unlabelled = 0
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
        strategy=cli.strategy,
        distilled=module.has_teacher,
        processes=count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes),
    )


_OPTIMIZERS = {"adamw": "AdamW", "paged_adamw_8bit": "paged 8-bit AdamW"}


def settings_lines(cli: RecipeCLI, parts: CompressedBackbone, prompt: NominalPrompt, offline: bool) -> Iterator[str]:
    """Backbone, reducer, routing, LoRA, stage 2 and optimiser, a line each."""
    module = cli.model
    backbone, optimizer = module.backbone_config, module.optimizer_config
    size = parts.family.nominal_image
    pixels = "" if size is None else f" of {size[0]} x {size[1]} pixels"
    seen = f"{prompt.tokens:,} visual tokens per image{pixels}" if prompt.region == "visual" else "text only"
    quantised = "" if backbone.quantization == "none" else f" ({backbone.quantization} decoder)"
    yield (
        f"backbone   {backbone.path}, {backbone.dtype}{quantised}, {backbone.attention}, "
        f"{parts.family.shape.num_layers} layers, {seen}"
    )
    yield f"reducer    {_reducer_words(parts, prompt)}"
    yield f"routing    {_routing_words(module.routing_config)}"
    yield f"LoRA       {_lora_words(module.lora_settings)}"
    if module.stage2_config is not None:
        stage2 = module.stage2_config
        read = "not read: --offline; its LoRA is taken to be as above"
        if module.first_stage is not None and not offline:
            read = f"{module.first_stage.reading}; its LoRA, as above, is frozen"
        yield f"stage 2    on {stage2.adapter} ({read})"
        if stage2.output_lora is not None:
            yield f"o_proj     LoRA {_lora_words(stage2.output_lora)}"
    if module.loss.name != CrossEntropy.name:
        own = [f"{key} {value}" for key, value in asdict(module.loss).items()]
        yield f"loss       {', '.join([module.loss.name, *own])}"
    if (teacher := module.distillation_config) is not None:
        yield f"teacher    the uncompressed backbone, weight {teacher.weight:g}, temperature {teacher.temperature:g}"
    routers = "" if (rate := optimizer.router_learning_rate) is None else f" (routers {rate:g})"
    yield (
        f"optimiser  {_OPTIMIZERS[optimizer.name]} at {optimizer.learning_rate:g}{routers}, "
        f"weight decay {optimizer.weight_decay + 0:g}, {optimizer.warmup_steps:,} warm-up steps, "
        f"then {optimizer.schedule}"
    )
    checkpointing = "with" if module.gradient_checkpointing else "without"
    yield f"trainer    precision {cli.config.trainer.precision or '32-true'}, {checkpointing} gradient checkpointing"
    yield f"output     {cli.output_dir}"


def _reducer_words(parts: CompressedBackbone, prompt: NominalPrompt) -> str:
    reducer = parts.reducer
    most = "" if reducer.fixed_count else "at most "
    kept = f"{most}{reducer.kept_words(prompt.tokens, parts.family.shape.num_layers)} of {prompt.tokens}"
    return ", ".join(filter(None, [f"{reducer.name}, keeps {reducer.keep_ratio:g} ({kept})", reducer.words]))


def _routing_words(config: RoutingConfig | None) -> str:
    if config is None:
        return "none, a token-only arm"
    query = f" of rank {config.query_rank}" if config.selector == "bilinear" else ""
    query += "".join(f", {key} {value}" for key, value in config.selector_options.items())
    query += ", query-conditioned" if config.query_conditioned else ""
    query += f", reads {' and '.join(config.features)}" if config.features else ""
    prior = "" if config.score_prior == "none" else f"{config.score_prior} prior, "
    fill = "" if config.fill == "zero" else f"fill {config.fill}, "
    gate = "value gate, " if config.value_gate else ""
    budget = f"{config.budget} budget"
    if config.budget == "bytes":
        budget = (
            f"keys and groups in {_percent(config.byte_share)} of the bytes of {POOLS[config.byte_pool]}, "
            f"sinks {config.sinks}, window {config.window}"
        )
    return (
        f"{config.words}{query}, {config.layout}, {budget}, {fill}{prior}{gate}balance weight {config.balance_weight:g}"
    )


def _lora_words(lora: LoraSettings) -> str:
    return f"rank {lora.rank}, alpha {lora.alpha}, dropout {lora.dropout:g}"


def training_lines(parts: CompressedBackbone) -> Iterator[str]:
    """The table of trained tensors, and how much stays frozen."""
    lora, frozen, first_stage = lora_groups(parts), frozen_group(parts), lora_groups(parts, trained=False)
    groups = trained_groups(parts)
    trained = _sum_of("trained", groups)
    together = [_sum_of("LoRA together", lora)] if len(lora) > 1 else []
    of_frozen = [_sum_of("of it stage 1's LoRA", first_stage)] if first_stage else []
    yield f"{'':<22}{'tensors':>8}{'parameters':>16}"
    for group in (*lora, *together, *groups[len(lora) :], trained, frozen, *of_frozen):
        yield f"{group.name:<22}{group.tensors:>8,}{group.parameters:>16,}"
    yield f"trained share {100 * trained.parameters / (trained.parameters + frozen.parameters):.6g} %"


def _sum_of(name: str, groups: list[ParameterGroup]) -> ParameterGroup:
    return ParameterGroup(name, sum(g.tensors for g in groups), sum(g.parameters for g in groups))


_THERE: dict[str, Callable[[], bool]] = {
    "gpu": torch.cuda.is_available,
    "cuda": torch.cuda.is_available,
    "mps": torch.backends.mps.is_available,
    "tpu": lambda: find_spec("torch_xla") is not None,
}


def check_ready(cli: RecipeCLI, parts: CompressedBackbone, offline: bool) -> None:
    """Check all that ``fit`` asks of a recipe and of its model laid out, on any machine; offline, no data are read."""
    kind, trainer, data = _strategy(cli), cli.config.trainer, cli.datamodule
    check_kind(kind, str(trainer.precision or "32-true"), cli.model)
    check_parts(kind, parts)
    if issubclass(kind, ZeroStrategy):
        if trainer.accelerator == "cpu":
            raise ValueError("trainer.strategy: ZeRO runs on CUDA GPUs; use trainer.strategy ddp or fsdp2 on a CPU")
        ((name, own),) = named_parts("strategy", trainer.strategy)
        zero_settings(**{"offload": False, "config": None, **PRESETS[name], **own})
    cli.check_watchers(read=not offline)
    if (destination := cli.destination) is not None:
        check_published(cli.model.backbone_config.path)
        check_name(destination.repo_id)
    check_cpus(trainer.devices, trainer.accelerator)
    if isinstance(data, CorpusDataModule):
        data.check_end(trainer.max_steps, trainer.limit_train_batches)
    elif isinstance(data, RecallDataModule) and (family := at_hand(parts.family, cli.model.backbone_config)):
        next(data.samples(family, 1))
        devices = count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes)
        data.training_order(world_size=devices, limit=trainer.limit_train_batches or 1.0)


def machine_lines(cli: RecipeCLI) -> Iterator[str]:
    """Why this machine cannot run a recipe that is valid; nothing where it can."""
    trainer, model = cli.config.trainer, cli.model
    accelerator = trainer.accelerator
    if not _THERE.get(accelerator, lambda: True)():
        yield f"trainer.accelerator {accelerator}: this machine has none"
    else:
        try:
            check_devices(trainer.devices, accelerator)
        except ValueError as error:
            yield str(error)
    if issubclass(_strategy(cli), ZeroStrategy):
        if accelerator == "auto" and not torch.cuda.is_available():
            yield "trainer.strategy: ZeRO runs on CUDA GPUs, and this machine has none"
        if find_spec("deepspeed") is None:
            yield "trainer.strategy needs DeepSpeed: pip install 'subtoken_train[deepspeed]'"
    eight_bit = model.optimizer_config.name == "paged_adamw_8bit"
    if (eight_bit or model.backbone_config.quantization != "none") and find_spec("bitsandbytes") is None:
        yield "quantised weights and optimisers need bitsandbytes: pip install 'subtoken_train[gpu]'"
    if model.backbone_config.attention == "flash_attention_2" and find_spec("flash_attn") is None:
        yield "model.backbone.attention flash_attention_2 needs flash-attn, which is not installed"


def folder_lines(cli: RecipeCLI) -> Iterator[str]:
    """Yield what already lies where the run would write, which needs --overwrite or --resume."""
    if not cli.config.overwrite and not cli.config.resume:
        try:
            RunFolder(cli.output_dir).check(resume=False)
        except ValueError as error:
            yield str(error)


def _strategy(cli: RecipeCLI) -> type[Strategy]:
    """Return the class of the recipe's strategy; nothing is built."""
    kind: type[Strategy] = KINDS["strategy"].names[cli.strategy]
    return kind
