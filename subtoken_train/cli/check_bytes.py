"""What ``subtoken-train check`` prints of bytes: the KV budget of one prompt, and the memory of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.datasets.recall_datamodule import RecallDataModule
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.ledger.kv_budget import entry_bytes
from subtoken_train.ledger.ledger import Anchor, Ledger
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
        yield "matched anchor: none, images keep different numbers of tokens; these bytes are the most that stay"
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
    note = f" (and {_size(index)} of group indices)" if index else ""
    return f"{name}: {_size(payload)} of {_size(dense)}, {_percent(payload / dense)}{note}"


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


def _size(num_bytes: int) -> str:
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
        distilled=module.distillation_config is not None,
        processes=count_devices(trainer.devices, trainer.accelerator, trainer.num_nodes),
    )
