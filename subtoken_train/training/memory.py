"""Peak memory of a training step on one device, predicted from a recipe before anything is loaded.

Counted are live tensors, op by op as autograd keeps them; no factor is fitted (docs/memory.md compares with steps).

Legend: e bytes per element of the backbone's dtype; D hidden, F MLP, v the value projection's width; M rows of a layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from operator import itemgetter
from typing import Any

from torch import nn

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.errors import refuse
from subtoken_train.families.images import FP32_BYTES
from subtoken_train.functional.quantized import dense_shape, quantised_bytes
from subtoken_train.training.optimizer import MIN_8BIT_ELEMENTS, OptimizerName
from subtoken_train.types import Quantization


@dataclass(frozen=True)
class Step:
    """A step as far as its memory depends on it; positions and bytes are a record's."""

    batch_size: int  # records of one forward pass on one device
    length: int  # positions before the reducer
    compressed: int  # of them, tokens of the image or the context
    labelled: int  # positions with a loss
    pixel_bytes: int = 0
    checkpointing: bool = False
    autocast: bool = False  # the trainer's precision is ``bf16-mixed`` or ``16-mixed``
    dropout: bool = True
    on_cpu: bool = False  # a dropout mask is fp32 then; on a GPU a byte per element
    quantization: Quantization = "none"  # of the decoder's linear layers
    optimizer: OptimizerName = "adamw"
    strategy: str = "auto"
    processes: int = 1
    distilled: bool = False  # the uncompressed backbone's logits of the labels are learned, too


class ActivationBytes:
    """Bytes of one record's activations, by its rows in a layer; all linear weights are frozen and keep no input."""

    def __init__(self, parts: CompressedBackbone, step: Step) -> None:
        shape, config = parts.family.shape, parts.family.decoder.config
        self.step, self.bank, self.splits = step, None if parts.active_routing is None else parts.bank, parts.splits
        self.element, self.hidden = shape.element_bytes, int(config.hidden_size)
        self.mlp, self.vocabulary = int(config.intermediate_size), int(config.vocab_size)
        self.heads, self.value = int(config.num_attention_heads), shape.value_dim
        self.query = self.heads * shape.head_dim
        self.mask_bytes = (FP32_BYTES if step.on_cpu else 1) if step.dropout else 0
        self.padded = self.splits or step.batch_size > 1  # then there is an [M, M] mask
        normed = hasattr(parts.family.decoder.layers[0].self_attn, "q_norm")
        self.head_norms = FP32_BYTES * (self.query + self.value) if normed else 0  # their inputs
        adapted: Any = parts.family.projection(0, "q").module
        self.rank = int(next(iter(adapted.r.values())))

    def input(self, rows: int) -> int:
        """Count what checkpointing keeps of a layer: its input, and the masks of its values."""
        return rows * (self.element * self.hidden + (0 if self.bank is None else self.bank.config.num_groups))

    def layer(self, rows: int) -> int:
        """Count what the backward pass of a layer needs.

        Per row: two norms (4 D each, their input in fp32); rotated query, key, value and output, e each, and a log-sum
        per head; gate, its SiLU and up of the MLP, 3 e F; inputs of the router (fp32) and of LoRA on q and v (copies,
        but in fp32 without dropout); the router's values and numbers.
        """
        e, step, bank = self.element, self.step, self.bank
        key_value = 2 * (self.query if self.padded and not self.splits else self.value)
        if self.splits and self.query != self.value:
            masked = step.batch_size > 1 or e == FP32_BYTES  # no kernel shares heads then
            key_value = 2 * (self.query if masked else self.value) + 2 * self.query
        attention = e * (2 * self.query + key_value) + FP32_BYTES * self.heads + self.head_norms
        own = e if step.autocast else FP32_BYTES
        adapters, routing = 2 * self.rank * own, 0
        if e == FP32_BYTES and not step.dropout:
            adapters += FP32_BYTES * self.hidden
        else:
            learned = bank is not None and bank.learned
            adapters += 2 * self.hidden * (own + self.mask_bytes) + (FP32_BYTES * self.hidden if learned else 0)
        if bank is not None:
            numbers = 5 * bank.outputs + (2 * bank.config.query_rank if bank.config.selector == "bilinear" else 0)
            numbers += sum(bank.config.num_groups if name == "norm" else 1 for name in bank.config.features)
            routing = (2 if bank.learned else 1) * e * self.value + FP32_BYTES * numbers
        each = 2 * FP32_BYTES * self.hidden + adapters + attention + routing + 3 * e * self.mlp
        return rows * each + (e * rows * rows if self.padded else 0)

    def first(self, rows: int) -> int:
        """Return what the first layer does not keep: its norm's input and the dropout masks."""
        shared = self.element == FP32_BYTES  # the residual stream itself, which the next norm's input is made of
        return rows * self.hidden * (2 * self.mask_bytes + (0 if shared else FP32_BYTES))

    def loss(self) -> int:
        """Count the final norm's input, and the largest moment of logits, cross-entropy and gradients."""
        entry = 6 * FP32_BYTES + self.element if self.step.distilled else 3 * FP32_BYTES
        return self.step.labelled * (FP32_BYTES * self.hidden + entry * self.vocabulary)

    def teacher(self, rows: int) -> int:
        """Count the peak of a layer without gradient: residual stream, norm's output, MLP, and any mask."""
        mask = self.element * rows * rows if self.padded else 0
        return rows * self.element * (3 * self.hidden + 3 * self.mlp) + mask

    def backward(self, rows: int) -> int:
        """Return the MLP's live gradients, of all records: three at its product, or one and a dequantised weight."""
        e, rows = self.element, self.step.batch_size * rows
        quantised = 0 if self.step.quantization == "none" else self.hidden
        return e * (self.mlp * max(3 * rows, rows + quantised) + 2 * rows * self.hidden)


_STATE_BLOCK = 256
_DIVIDED = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3, "fsdp2": 3}
"""Parts that a strategy divides over processes: 1 the optimiser's state, 2 gradients too, 3 weights too; 0 nothing."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose, in the order of a report; ``rows`` of one record before and after the reducer."""

    rows: tuple[int, int]
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """The sum."""
        return sum(size for _, size in self.parts)


def estimate_memory(parts: CompressedBackbone, step: Step) -> MemoryEstimate:
    """Estimate a step's peak memory for a model that is loaded or laid out."""
    no_room = f"max_length={step.length} leaves no room for text beside the {step.compressed} tokens of an image"
    refuse((step.length <= step.compressed, no_room))
    rows, sizes = record_rows(parts, step.length, step.compressed), ActivationBytes(parts, step)
    kept = sum(sizes.layer(count) for count in rows) - sizes.first(rows[0])
    backward = sizes.backward(max(rows))
    if step.checkpointing:
        kept = sum(sizes.input(count) for count in rows)
        backward += step.batch_size * sizes.layer(max(rows))
    kept *= step.batch_size
    working = max(step.batch_size * sizes.loss(), backward)
    tower = parts.family.tower_bytes(step.batch_size * step.pixel_bytes) if step.pixel_bytes else 0
    phases: tuple[tuple[str, int], ...] = (("kept for backward", kept), ("loss or backward", working))
    before = ("vision tower", tower)
    if step.distilled:
        held = step.batch_size * step.labelled * sizes.element * sizes.vocabulary  # while the student's pass runs
        phases = (("teacher's logits", held), *phases)
        before = max(before, ("teacher's pass", step.batch_size * sizes.teacher(step.length) + held), key=itemgetter(1))
    batch = ("batch", step.batch_size * (step.pixel_bytes + 3 * 8 * step.length))
    largest = phases if sum(size for _, size in phases) >= before[1] else (before,)
    return MemoryEstimate((step.length, rows[-1]), (*_held(parts, step), batch, *largest))


def record_rows(parts: CompressedBackbone, length: int, compressed: int) -> list[int]:
    """Return a record's rows in each layer, of ``length`` positions, where the reducer has ``compressed`` of them."""
    counts = parts.reducer.running_tokens(compressed, parts.family.shape.num_layers)
    return [length - compressed + count for count in counts]


def checkpoint_bytes(parts: CompressedBackbone, optimizer: OptimizerName) -> tuple[int, int]:
    """Return the bytes of what trains, in fp32, and of a checkpoint: these with the optimiser's state."""
    trained = [parameter.numel() for parameter in parts.parameters() if parameter.requires_grad]
    adapter, state = FP32_BYTES * sum(trained), 0
    for count in trained:  # two moments
        whole = optimizer == "adamw" or count < MIN_8BIT_ELEMENTS
        state += 2 * (FP32_BYTES * count if whole else count + FP32_BYTES * ceil(count / _STATE_BLOCK))
    return adapter, adapter + state


def check_strategy(quantization: str, strategy: Any) -> None:
    """Raise ``ValueError`` if a strategy would share out weights that are held in 4 or 8 bits."""
    if quantization != "none" and isinstance(strategy, str) and _DIVIDED.get(strategy, 0) == 3:
        raise ValueError(f"trainer.strategy {strategy} cannot divide weights in {quantization}; use ddp or zero2")


def _held(parts: CompressedBackbone, step: Step) -> Iterator[tuple[str, int]]:
    divided, host = _DIVIDED.get(step.strategy, 0), step.strategy == "zero3_offload"
    share = [step.processes if level < divided else 1 for level in range(3)]
    weights, layer = _frozen_bytes(parts, step.quantization)
    trained, whole = checkpoint_bytes(parts, step.optimizer)
    yield "frozen weights", 0 if host else ceil(weights / share[2])
    if divided == 3:
        yield "a gathered layer", layer
    yield "LoRA + routers", 0 if host else ceil(trained / share[2])
    yield "gradients", ceil(trained / share[1])
    yield "optimiser state", 0 if host else ceil((whole - trained) / share[0])


def _frozen_bytes(parts: CompressedBackbone, quantization: Quantization) -> tuple[int, int]:
    layers = parts.family.decoder.layers
    linear = {id(module.weight) for module in layers.modules() if isinstance(module, nn.Linear)}

    def held(parameter: nn.Parameter) -> int:
        if quantization != "none" and id(parameter) in linear:
            return quantised_bytes(dense_shape(parameter), quantization)
        return parameter.numel() * parameter.element_size()

    whole, layer = (sum(held(p) for p in each.parameters() if not p.requires_grad) for each in (parts, layers[0]))
    return whole, layer
