"""Plans of runs and grids before they start: one ``RunPlan`` for all commands, and the lines that they print.

Operations are those of ``ledger/flops.py``, with recomputation and distillation's teacher; GPU time is these over a
named GPU's peak at ``UTILISATION`` of it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache

from subtoken_train.artifact.card import CardSections
from subtoken_train.artifact.hub import check_fetched
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.terminal import about
from subtoken_train.datasets.datamodule import CorpusDataModule, InstructionDataModule
from subtoken_train.datasets.known_files import DOWNLOAD_BYTES, MEAN_RECORDS, MEAN_SPREAD, fetch_command
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.runner.data_file import read_scores
from subtoken_train.evaluation.runner.dry_run import DryRun
from subtoken_train.families.backbone_config import is_hub_id
from subtoken_train.families.images import FP32_BYTES
from subtoken_train.ledger.flops import PEAKS, UTILISATION, TrainingFlops
from subtoken_train.ledger.kv_budget import entry_bytes
from subtoken_train.ledger.ledger import Anchor, nominal_ledger
from subtoken_train.training import preflight
from subtoken_train.training.memory import MemoryEstimate, Step, checkpoint_bytes, estimate_memory, record_rows
from subtoken_train.training.panels.throughput import flops_of

PUBLISHED_BYTES, RECORD_BYTES = 2, 800
"""Bytes of a parameter in a published model's files, and of an answer in records (measured on ``recall``)."""
GPU_SIZES, CONTEXT_BYTES = (16, 24, 40, 80), 10**9
"""GB of memory that GPUs have, and what a GPU's context, libraries and allocator take of it."""


@dataclass
class Reading:
    """Collects what is found in the data: what would stop fit, lengths of records, steps, and measured seconds."""

    stops: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    plan: preflight.StepPlan | None = None
    seconds: float | None = None


def steps_of(cli: RecipeCLI, batches: int | None = None) -> preflight.StepPlan:
    """Plan the steps of a run; ``batches`` per device and epoch, None where the data were not read."""
    trainer = cli.config.trainer
    accumulate = trainer.accumulate_grad_batches
    together = cli.datamodule.batch_size * accumulate
    together *= preflight.count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes)
    return preflight.plan_steps(together, trainer.max_steps, trainer.max_epochs, batches, accumulate)


@dataclass(frozen=True)
class RunPlan:
    """Needs of a run, or of several; None or empty where something is not known, or no part of it.

    Attributes:
        work: what is computed, or why operations (fewest and most) cannot be told.
        seconds: at the pace that was measured on this machine.
        memory: peak bytes of one device.
        shared: the same where eight devices share the weights (``zero3``).
        disk: (what is written, bytes at most).
        missing: (what is not on this machine, its bytes or None, how to get it).
    """

    work: str
    flops: tuple[float, float] | None
    on_cpu: bool = False
    seconds: float | None = None
    memory: int | None = None
    shared: int | None = None
    disk: tuple[tuple[str, int], ...] = ()
    missing: tuple[tuple[str, int | None, str], ...] = ()

    def lines(self, price: float | None = None) -> Iterator[str]:
        """Yield operations and GPU time, money at a price of a GPU hour, memory, disk, and what is missing."""
        if self.flops is None:
            yield f"compute    not known: {self.work}"
        else:
            yield f"compute    {_span(self.flops, '{:.1e}'.format)} FLOPs: {self.work}"
            time = f"{on_gpus(self.flops)}, at {UTILISATION:.0%} of the bf16 peak (docs/launch.md)"
            time = "on a CPU; 'subtoken-train check' measures the pace of small models" if self.on_cpu else time
            if self.seconds is not None:
                time = f"{about(self.seconds)} on this machine, at the pace that was measured now"
            yield f"time       {time}"
            if not self.on_cpu:
                yield f"on eight   {on_gpus(self.flops, 'of 8 {}s', 1 / 8)}, if they share it evenly"
                if price is not None:
                    cost = on_gpus(self.flops, "on {}s", price / 3600, "{:,.2f}".format)
                    yield f"money      {cost}, at {price:g} a GPU hour"
        if self.memory is not None:
            yield f"memory     {size_words(self.memory)} on each device at the peak{self._fits()}"
        if self.disk:
            parts = ", ".join(f"{what} {size_words(size)}" for what, size in self.disk)
            yield f"disk       {size_words(sum(size for _, size in self.disk))} at most: {parts}"
        for what, size, how in self.missing:
            yield f"missing    {what} ({'size not known here' if size is None else size_words(size)}): {how}"

    def _fits(self) -> str:
        if self.on_cpu:
            return ""
        shared = f"more than a GPU of {GPU_SIZES[-1]} GB; eight of {{}} GB hold it under zero3"
        for held, words in ((self.memory, "fits a GPU of {} GB"), (self.shared, shared)):
            for size in GPU_SIZES:
                if held is not None and held + CONTEXT_BYTES <= size * 10**9:
                    return f", {words.format(size)}"
        return f", {shared.partition(';')[0]}"


def on_gpus(
    flops: tuple[float, float],
    where: str = "of one {}",
    factor: float = 1,
    words: Callable[[float], str] = about,
    gpus: Iterable[str] = PEAKS,
) -> str:
    """Return ``words`` of the seconds of so many operations on each of some GPUs, as is assumed, times a factor."""
    each = {gpu: [factor * count / (PEAKS[gpu] * UTILISATION) for count in flops] for gpu in gpus}
    return " or ".join(f"{_span((low, high), words)} {where.format(gpu)}" for gpu, (low, high) in each.items())


def _span(ends: tuple[float, float], words: Callable[[float], str]) -> str:
    """Return a range in words: its middle and a percentage where the ends are near to each other."""
    low, high = ends
    if high < 1.25 * low or low == high:
        spread = round(100 * (high - low) / (high + low or 1))
        return words((low + high) / 2) + f" ± {spread} %" * bool(spread)
    first, last = words(low), words(high)
    unit = f" {last.rpartition(' ')[2]}" if " " in last else ""
    return first if first == last else f"{first.removesuffix(unit)} to {last.removeprefix('about ')}"


def size_words(num_bytes: int) -> str:
    """Return a number of bytes in the largest unit that it fills."""
    unit, name = next((u for u in ((2**30, "GiB"), (2**20, "MiB")) if num_bytes >= u[0]), (2**10, "KiB"))
    return f"{num_bytes / unit:,.2f} {name}"


def plan_of_fit(
    cli: RecipeCLI, parts: CompressedBackbone, prompt: preflight.NominalPrompt, reading: Reading | None = None
) -> RunPlan:
    """Return the plan of a training run; without a ``reading`` of the data, lengths are a range."""
    reading = reading or Reading()
    step, steps = training_step(cli, parts, prompt), reading.plan or steps_of(cli)
    adapter, checkpoint = checkpoint_bytes(parts, cli.model.optimizer_config.name)
    adapter += FP32_BYTES * sum(own.parameters for own in preflight.lora_groups(parts, trained=False))  # stage 1's
    whole = step.quantization == "none"  # weights of 4 or 8 bits are not shared out
    copies = cli.config.checkpoint.keep_last + 1  # an old one goes when a new one stands
    work = "trainer.max_steps is not set, and the data were not read"
    flops: tuple[float, float] | None = None
    if steps.steps is not None:
        (fewest, most), words = _mean_record(cli, parts, prompt, step, reading.tokens)
        work = f"{steps.steps:,} steps of {steps.samples_per_step:,} records of {words}"
        records = steps.steps * steps.samples_per_step
        flops = (records * fewest, records * most)
    return RunPlan(
        work,
        flops,
        step.on_cpu,
        reading.seconds,
        estimate_memory(parts, step).total,
        estimate_memory(parts, replace(step, strategy="zero3", processes=8)).total if whole else None,
        ((f"{copies} checkpoints", copies * checkpoint), ("the adapter", adapter)),
        tuple(_missing(cli, sum(p.numel() for p in parts.parameters() if not p.requires_grad))),
    )


def _mean_record(
    cli: RecipeCLI, parts: CompressedBackbone, prompt: preflight.NominalPrompt, step: Step, tokens: list[int]
) -> tuple[tuple[float, float], str]:
    """Return fewest and most operations of a mean record, and its length: read, of a known file, or a range."""
    data = cli.datamodule
    file = Path(data.train_file).name if isinstance(data, InstructionDataModule) else ""
    if file in MEAN_RECORDS and not tokens and parts.family.nominal_image is None:
        known, pictured = MEAN_RECORDS[file]
        text = min(round(known), step.length - prompt.tokens)
        mean = pictured * record_flops(parts, step, prompt.tokens + text)
        mean += (1 - pictured) * record_flops(parts, replace(step, compressed=0), text)
        words = f"about {text + pictured * prompt.tokens:,.0f} tokens, a mean that is estimated"
        return ((1 - MEAN_SPREAD) * mean, (1 + MEAN_SPREAD) * mean), words
    read = round(sum(min(n, step.length) for n in tokens) / len(tokens)) if tokens else 0
    lengths = (read, read) if tokens else (min(sum(prompt.regions.values()), step.length), step.length)
    low, high = (record_flops(parts, step, length) for length in lengths)
    return (low, high), f"{_span(lengths, '{:,.0f}'.format)} tokens"


def record_flops(parts: CompressedBackbone, step: Step, length: int) -> float:
    """Return the operations of training on one record of ``length`` tokens before the reducer."""
    flops = flops_of(parts.family, {f"compressed.{name}": p for name, p in parts.named_parameters() if p.requires_grad})
    forward = TrainingFlops(flops.size, [0] * len(flops.trained))
    rows = record_rows(parts, length, min(step.compressed, length))
    total = flops.sample(rows) + float(flops.head(torch.tensor([rows[-1]])))
    if step.checkpointing:
        total += forward.sample(rows)
    if step.distilled:
        total += forward.sample([length] * len(rows))
    return total


def plan_of_recipe(cli: RecipeCLI) -> RunPlan:
    """Return a recipe's plan, without reading data or asking a server."""
    check_fetched(str(cli.model.backbone_config.path))
    parts = preflight.lay_out(cli.model, offline=True)
    return plan_of_fit(cli, parts, preflight.nominal_prompt(parts.family, cli.datamodule))


def added(each: Iterable[RunPlan]) -> RunPlan:
    """Return the plan of several runs one after another: time and disk add up, memory is the largest."""
    runs = list(each)
    counted = [plan.flops for plan in runs if plan.flops is not None]
    return RunPlan(
        f"{len(runs)} runs" if len(counted) == len(runs) else f"{len(counted)} of {len(runs)} runs, others not known",
        (sum(low for low, _ in counted), sum(high for _, high in counted)) if counted else None,
        on_cpu=all(plan.on_cpu for plan in runs),
        memory=max(plan.memory or 0 for plan in runs),
        shared=None if any(plan.shared is None for plan in runs) else max(plan.shared or 0 for plan in runs),
        disk=(("checkpoints and adapters", sum(size for plan in runs for _, size in plan.disk)),),
        missing=tuple(dict.fromkeys(missing for plan in runs for missing in plan.missing)),
    )


def plan_of_grid(checked: DryRun) -> RunPlan:
    """Return the plan of a grid's evaluation: prompts' passes and records, without answers' tokens and adapters."""
    counts = [samples for _, samples in checked.tasks if samples is not None]
    backbones = {arm.arm.facts.backbone: arm.laid_out.parameters for arm in checked.arms}
    missing = tuple(each for path, size in backbones.items() for each in _absent(path, size))
    if len(counts) < len(checked.tasks):
        return RunPlan("the number of samples of a task", None, missing=missing)
    prompts = sum(counts) * len(checked.arms)
    flops = sum(count * each for arm in checked.arms for count, each in zip(counts, arm.flops, strict=True))
    work = f"compressed regions of {prompts:,} nominal prompts; answers come on top"
    return RunPlan(work, (flops, flops), disk=(("records", RECORD_BYTES * prompts),), missing=missing)


def _absent(path: str, parameters: int) -> Iterator[tuple[str, int | None, str]]:
    if is_hub_id(path) and not _is_cached(path):
        yield f"weights of {path}", PUBLISHED_BYTES * parameters, f"hf download {path}, or fetched by the first run"


def _missing(cli: RecipeCLI, parameters: int) -> Iterator[tuple[str, int | None, str]]:
    data = cli.datamodule
    yield from _absent(cli.model.backbone_config.path, parameters)
    start = getattr(cli.model.routing_config, "warm_start", None)
    if start is not None and not Path(start).exists():
        yield start, None, "subtoken-train calibrate kvzap"
    files: list[Any] = [data.train_file, data.val_file] if isinstance(data, InstructionDataModule) else []
    if isinstance(data, CorpusDataModule):
        source = data.train_source
        if Path(source.name).suffix or Path(source.name).exists():
            files = [source.name]
        elif not _is_cached(source.name):
            size = DOWNLOAD_BYTES.get((source.name, str(source.config)))
            yield f"data set {source.name}", size, "fetched by the first run"
    for file in files:
        if file is not None and not Path(file).exists():
            yield f"{file}", None, fetch_command(file) or "a file of your own; check the path"


def _is_cached(name: str) -> bool:
    files = ("model.safetensors", "model.safetensors.index.json")
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
        return True
    return (Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}").is_dir()


def training_step(cli: RecipeCLI, parts: CompressedBackbone, prompt: preflight.NominalPrompt) -> Step:
    """Return a recipe's step as far as its memory depends on it: the longest records, every text token labelled."""
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
        batch_size=data.batch_size, length=length, compressed=prompt.tokens, labelled=length - unlabelled,
        pixel_bytes=pixels, checkpointing=module.gradient_checkpointing,
        autocast=str(trainer.precision).endswith("-mixed"), dropout=module.lora_settings.dropout > 0,
        on_cpu=on_cpu(trainer), quantization=module.backbone_config.quantization,
        optimizer=module.optimizer_config.name, strategy=cli.strategy, distilled=module.has_teacher,
        processes=preflight.count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes),
    )  # fmt: skip


def on_cpu(trainer: Any) -> bool:
    """Return whether a recipe's trainer would run on the CPU here."""
    return trainer.accelerator == "cpu" or (trainer.accelerator == "auto" and not torch.cuda.is_available())


def memory_lines(estimate: MemoryEstimate, step: Step) -> Iterator[str]:
    """Yield the peak memory by purpose; ``training/memory.py`` has the formulas."""
    before, after = estimate.rows
    held = "this device" if step.processes == 1 else f"each of {step.processes} devices"
    yield f"{step.batch_size} records of {before:,} tokens ({after:,} after the reducer), on {held}"
    for name, size in (*estimate.parts, ("peak", estimate.total)):
        yield f"{name:<18}{size_words(size):>12}"
    yield "live tensors; a GPU's context, libraries and allocator take about 1 GB more"


def training_lines(parts: CompressedBackbone) -> Iterator[str]:
    """Yield the table of trained tensors, and how much stays frozen."""
    lora, first_stage = preflight.lora_groups(parts), preflight.lora_groups(parts, trained=False)
    bank, frozen, routers = parts.bank, preflight.count_group("frozen", parts.parameters(), trained=False), []
    if bank is not None and bank.learned:
        routers = [preflight.count_group(f"routers ({bank.config.selector})", bank.parameters(), trained=True)]
    trained = _sum_of("trained", [*lora, *routers])
    together = [_sum_of("LoRA together", lora)] if len(lora) > 1 else []
    of_frozen = [_sum_of("of it stage 1's LoRA", first_stage)] if first_stage else []
    yield f"{'':<22}{'tensors':>8}{'parameters':>16}"
    for group in (*lora, *together, *routers, trained, frozen, *of_frozen):
        yield f"{group.name:<22}{group.tensors:>8,}{group.parameters:>16,}"
    yield f"trained share {100 * trained.parameters / (trained.parameters + frozen.parameters):.6g} %"


def _sum_of(name: str, groups: list[preflight.ParameterGroup]) -> preflight.ParameterGroup:
    return preflight.ParameterGroup(name, sum(g.tensors for g in groups), sum(g.parameters for g in groups))


def budget_lines(parts: CompressedBackbone, prompt: preflight.NominalPrompt) -> Iterator[str]:
    """Yield the ledger by layer and region, its totals, and the token-only arm of equal bytes."""
    shape, budget = parts.family.shape, preflight.budget_of(parts)
    kept = parts.reducer.layer_tokens(prompt.tokens, shape.num_layers)
    ledger, entry = nominal_ledger(shape, prompt.regions, budget, parts.cut_layer, kept), entry_bytes(shape)
    yield f"{prompt.note}; bytes of one layer, {str(parts.family.model.dtype).removeprefix('torch.')}"
    yield f"{'':<16}{'region':<9}{'tokens':>7}{'kept':>6}{'keys B':>12}{'values B':>12}{'index B':>9}{'KV':>12}"
    for band in preflight.layer_bands(ledger):
        label = f"layers {band.first}-{band.last}" if band.last > band.first else f"layer {band.first}"
        for row in band.rows:
            share = percent(row.payload_bytes / (entry * row.tokens_before))
            sizes = f"{row.key_bytes:>12,}{row.value_bytes:>12,}{row.index_bytes:>9,}{share:>12}"
            yield f"{label:<16}{row.region:<9}{row.tokens_before:>7,}{row.tokens:>6,}{sizes}"
            label = ""
    for name, region in ((f"{prompt.region} region", prompt.region), ("whole prompt", None)):
        payload, dense = ledger.bytes_of(region, with_index=False), ledger.dense_bytes(region)
        index = ledger.bytes_of(region) - payload
        note = f" (and {size_words(index)} of group indices)" if index else ""
        yield f"{name}: {size_words(payload)} of {size_words(dense)}, {percent(payload / dense)}{note}"
    if parts.bank is None:
        yield "matched anchor: none, this arm routes nothing"
    elif not parts.reducer.fixed_count:
        yield "matched anchor: none, images keep different numbers of tokens; these bytes are the maximum"
    else:
        yield f"matched anchor: {_anchor_words(prompt, partial(preflight.equal_bytes_anchor, parts, prompt))}"
        if parts.cut_layer:  # every token stays below the cut: what that makes of the paper's nominal fraction
            words = _anchor_words(prompt, partial(preflight.nominal_anchor, parts, prompt))
            yield f"at the nominal {percent(budget.total_kv_fraction)} of all layers: {words}"


def _anchor_words(prompt: preflight.NominalPrompt, solve: Callable[[], Anchor]) -> str:
    try:
        anchor = solve()
    except ValueError as error:
        return str(error)
    kept = f"{anchor.words} of {anchor.tokens} {prompt.region} tokens, every group"
    return f"{kept} (keep_ratio {anchor.keep_ratio:g}), {percent(anchor.fraction)}"


def percent(fraction: float) -> str:
    """Return a share with six digits."""
    return f"{100 * fraction:.6g} %"


def card_sections(
    cli: Any, parts: CompressedBackbone, recipe: Path | None, arm: str, metrics: str | None, repo_id: str | None
) -> CardSections:
    """Return the sections of a model card besides the configuration; without a recipe the scores alone."""
    evaluation = None if metrics is None else read_scores(Path(metrics), arm)
    if recipe is None:
        return CardSections(evaluation=evaluation, repo_id=repo_id)
    table = "\n".join(["```", *budget_lines(parts, preflight.nominal_prompt(parts.family, cli.datamodule)), "```"])
    return CardSections(recipe.read_text(encoding="utf-8"), table, evaluation, repo_id)
