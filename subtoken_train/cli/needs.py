"""Hours, memory, disk and downloads of a run or a grid before it starts: one block of lines for all commands.

Operations are those of ``ledger/flops.py``, here with the recomputation of gradient checkpointing and distillation's
teacher; GPU time is these over a named GPU's peak at ``UTILISATION`` of it. Money is not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants, try_to_load_from_cache

from subtoken_train.artifact.published import check_fetched
from subtoken_train.cli.check_data import Reading, plan_of
from subtoken_train.cli.check_lines import size_words, training_step
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.recipe_source import RecipeSource
from subtoken_train.cli.terminal import about
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.datasets.known_files import DOWNLOAD_BYTES, fetch_command
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.backbone_config import is_hub_id
from subtoken_train.families.images import FP32_BYTES
from subtoken_train.ledger.flops import PEAKS, UTILISATION, TrainingFlops
from subtoken_train.training.memory import Step, checkpoint_bytes, estimate_memory, record_rows
from subtoken_train.training.panels.throughput import flops_of
from subtoken_train.training.preflight import NominalPrompt, lay_out, lora_groups, nominal_prompt

if TYPE_CHECKING:
    from subtoken_train.evaluation.runner.dry_run import DryRun

PUBLISHED_BYTES = 2
"""Bytes of a parameter in the files of published models, which are in bf16 or fp16."""
RECORD_BYTES = 800
"""Bytes of an answer in a grid's records, as measured on ``recall``; long answers take more."""


@dataclass(frozen=True)
class Needs:
    """Holds what a run or a grid needs.

    Attributes:
        work: what is computed, in words.
        flops: fewest and most operations; None where they cannot be told, as ``work`` explains.
        on_cpu: it is to run on a CPU.
        seconds: at the pace that was measured on this machine; None: nothing was measured.
        memory: peak of one device in bytes; None: not said here.
        disk: (what is written, bytes at most).
        downloads: (what is not on this machine, its bytes or None, how to get it).
    """

    work: str
    flops: tuple[float, float] | None
    on_cpu: bool = False
    seconds: float | None = None
    memory: int | None = None
    disk: tuple[tuple[str, int], ...] = ()
    downloads: tuple[tuple[str, int | None, str], ...] = ()


def needs_lines(needs: Needs) -> Iterator[str]:
    """Yield the block: operations and GPU time, memory, disk, downloads."""
    if needs.flops is None:
        yield f"compute    not known: {needs.work}"
    else:
        yield f"compute    {_span([f'{each:.1e}' for each in needs.flops])} FLOPs: {needs.work}"
        yield f"time       {_time_words(needs)}"
    if needs.memory is not None:
        yield f"memory     {size_words(needs.memory)} on each device at the peak"
    if needs.disk:
        parts = ", ".join(f"{what} {size_words(size)}" for what, size in needs.disk)
        yield f"disk       {size_words(sum(size for _, size in needs.disk))} at most: {parts}"
    for what, size, how in needs.downloads:
        yield f"missing    {what} ({'size not known here' if size is None else size_words(size)}): {how}"


def _time_words(needs: Needs) -> str:
    """Return the time on each named GPU and what is assumed; on a CPU the pace that was measured here, if any."""
    if needs.seconds is not None:
        return f"{about(needs.seconds)} on this machine, at the pace that was measured now"
    if needs.on_cpu:
        return "on a CPU; 'subtoken-train check' measures the pace of small models"
    assert needs.flops is not None
    times = [gpu_time(needs.flops, name) for name in PEAKS]
    return f"{' or '.join(times)}, at {UTILISATION:.0%} of the bf16 peak (docs/launch.md)"


def gpu_time(flops: tuple[float, float], gpu: str) -> str:
    """Return the time of so many operations on one GPU of a name, as is assumed."""
    return f"{_span([about(each / (PEAKS[gpu] * UTILISATION)) for each in flops])} of one {gpu}"


def _span(ends: list[str]) -> str:
    """Return two figures as a range; what both begin and end with is said once."""
    first, last = ends
    unit = f" {last.rpartition(' ')[2]}" if " " in last else ""
    return first if first == last else f"{first.removesuffix(unit)} to {last.removeprefix('about ')}"


def fit_needs(
    cli: RecipeCLI, parts: CompressedBackbone, prompt: NominalPrompt, reading: Reading | None = None
) -> Needs:
    """Return what a training run needs.

    Args:
        cli: the recipe.
        parts: its model, laid out.
        prompt: see ``nominal_prompt``; without lengths that were read, the shortest record.
        reading: what ``data_lines`` found in the data; None: nothing was read.
    """
    step, plan = training_step(cli, parts, prompt), reading.plan if reading and reading.plan else plan_of(cli)
    adapter, checkpoint = checkpoint_bytes(parts, cli.model.optimizer_config.name)
    adapter += FP32_BYTES * sum(group.parameters for group in lora_groups(parts, trained=False))  # stage 1's, frozen
    copies = cli.config.checkpoint.keep_last + 1  # an old one goes when a new one stands
    needs = Needs(
        "trainer.max_steps is not set, and the data were not read",
        None,
        step.on_cpu,
        None if reading is None else reading.seconds,
        estimate_memory(parts, step).total,
        ((f"{copies} checkpoints", copies * checkpoint), ("the adapter", adapter)),
        tuple(_missing(cli, sum(p.numel() for p in parts.parameters() if not p.requires_grad))),
    )
    if plan.steps is None:
        return needs
    lengths = [min(sum(prompt.regions.values()), step.length), step.length]
    if reading is not None and reading.tokens:
        lengths = [round(sum(min(n, step.length) for n in reading.tokens) / len(reading.tokens))] * 2
    records = plan.steps * plan.samples_per_step
    words = _span([f"{length:,}" for length in lengths])
    fewest, most = (records * record_flops(cli, parts, step, length) for length in lengths)
    work = f"{plan.steps:,} steps of {plan.samples_per_step:,} records of {words} tokens"
    return replace(needs, work=work, flops=(fewest, most))


def record_flops(cli: RecipeCLI, parts: CompressedBackbone, step: Step, length: int) -> float:
    """Return the operations of training on one record of ``length`` tokens before the reducer."""
    trained = {f"compressed.{name}": p for name, p in parts.named_parameters() if p.requires_grad}
    flops = flops_of(parts.family, trained)
    forward = TrainingFlops(flops.size, [0] * len(flops.trained))
    rows = record_rows(parts, length, min(step.compressed, length))
    total = flops.sample(rows) + float(flops.head(torch.tensor([rows[-1]])))
    if step.checkpointing:
        total += forward.sample(rows)
    if step.distilled:
        total += forward.sample([length] * len(rows))
    return total


def recipe_needs(recipe: RecipeSource | Path) -> Needs:
    """Return what a recipe needs, without reading data or asking a server."""
    cli = RecipeCLI(["--config", str(recipe)] if isinstance(recipe, Path) else recipe)
    check_fetched(str(cli.model.backbone_config.path))
    parts = lay_out(cli.model, offline=True)
    return fit_needs(cli, parts, nominal_prompt(parts.family, cli.datamodule))


def added(each: Iterable[Needs]) -> Needs:
    """Return what several runs need one after another: time and disk add up, memory is the largest."""
    runs = list(each)
    counted = [needs.flops for needs in runs if needs.flops is not None]
    return Needs(
        f"{len(runs)} runs" if len(counted) == len(runs) else f"{len(counted)} of {len(runs)} runs, others not known",
        (sum(low for low, _ in counted), sum(high for _, high in counted)) if counted else None,
        on_cpu=all(needs.on_cpu for needs in runs),
        memory=max(needs.memory or 0 for needs in runs),
        disk=(("checkpoints and adapters", sum(size for needs in runs for _, size in needs.disk)),),
        downloads=tuple(dict.fromkeys(missing for needs in runs for missing in needs.downloads)),
    )


def grid_needs(checked: DryRun) -> Needs:
    """Return what a grid's evaluation needs: prompts' passes and records, without answers' tokens and adapters."""
    counts = [task.samples for task in checked.tasks if task.samples is not None]
    backbones = {arm.arm.facts.backbone: arm.laid_out.parameters for arm in checked.arms}
    downloads = tuple(
        (f"weights of {path}", PUBLISHED_BYTES * size, _hub_command(path))
        for path, size in backbones.items()
        if is_hub_id(path) and not _is_cached(path)
    )
    if len(counts) < len(checked.tasks):
        return Needs("the number of samples of a task", None, downloads=downloads)
    samples = sum(counts)
    flops = sum(count * each for arm in checked.arms for count, each in zip(counts, arm.flops, strict=True))
    work = f"compressed regions of {samples * len(checked.arms):,} nominal prompts; answers come on top"
    return Needs(
        work, (flops, flops), disk=(("records", RECORD_BYTES * samples * len(checked.arms)),), downloads=downloads
    )


def _missing(cli: RecipeCLI, parameters: int) -> Iterator[tuple[str, int | None, str]]:
    """Yield weights and data that a recipe reads and this machine does not hold."""
    path, data = cli.model.backbone_config.path, cli.datamodule
    if is_hub_id(path) and not _is_cached(path):
        yield f"weights of {path}", PUBLISHED_BYTES * parameters, _hub_command(path)
    files: list[Any] = []
    if isinstance(data, InstructionDataModule):
        files = [data.train_file, data.val_file]
    elif isinstance(data, CorpusDataModule):
        source = data.train_source
        if not Path(source.name).suffix and not Path(source.name).exists():
            if not _is_cached(source.name):
                size = DOWNLOAD_BYTES.get((source.name, str(source.config)))
                yield f"data set {source.name}", size, "fetched by the first run"
        else:
            files = [source.name]
    for file in files:
        if file is not None and not Path(file).exists():
            yield f"{file}", None, fetch_command(file) or "a file of your own; check the path"


def _hub_command(path: str) -> str:
    return f"hf download {path}, or fetched by the first run"


def _is_cached(name: str) -> bool:
    """Return whether the Hub's cache holds weights of a model, or anything of a data set, of this name."""
    files = ("model.safetensors", "model.safetensors.index.json")
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
        return True
    return (Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}").is_dir()
