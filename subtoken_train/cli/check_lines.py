"""What ``subtoken-train check`` prints of a recipe's settings, and of what it trains."""

from __future__ import annotations

from collections.abc import Iterator

from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.lora import LoraSettings
from subtoken_train.routing import RoutingConfig
from subtoken_train.training.nominal_prompt import NominalPrompt
from subtoken_train.training.preflight import ParameterGroup, frozen_group, lora_groups, trained_groups

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
    if (teacher := module.distillation_config) is not None:
        yield f"teacher    the uncompressed backbone, weight {teacher.weight:g}, temperature {teacher.temperature:g}"
    routers = "" if (rate := optimizer.router_learning_rate) is None else f" (routers {rate:g})"
    yield (
        f"optimiser  {_OPTIMIZERS[optimizer.name]} at {optimizer.learning_rate:g}{routers}, "
        f"weight decay {optimizer.weight_decay:g}, {optimizer.warmup_steps:,} warm-up steps, then {optimizer.schedule}"
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
    query += ", query-conditioned" if config.query_conditioned else ""
    query += f", reads {' and '.join(config.features)}" if config.features else ""
    prior = "" if config.score_prior == "none" else f"{config.score_prior} prior, "
    fill = "" if config.fill == "zero" else f"fill {config.fill}, "
    gate = "value gate, " if config.value_gate else ""
    scope = "" if config.balance_scope == "sample" else f" per {config.balance_scope}"
    temperature = "" if config.temperature == 1 else f", temperature {config.temperature:g}"
    return (
        f"{config.selector}{query}, S={config.num_groups}, K={config.kept_groups}, {config.layout}, "
        f"{config.budget} budget, {fill}{prior}{gate}balance weight {config.balance_weight:g}{scope}{temperature}"
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
