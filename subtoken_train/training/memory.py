"""Peak memory of a training step on one device, predicted from a recipe before anything is loaded.

Counted are live tensors: what benchmarks/training_memory.py measures and docs/memory.md compares. The formulas follow
what autograd keeps, op by op; no factor is fitted. B records of N positions, M left after the reducer, n of them with a
label; e bytes per element of the backbone's dtype; D hidden, F MLP, V vocabulary, q/k/v the projections' widths.

*Held all the time*: frozen weights (``functional/quantized.py`` for 4 and 8 bits), trained tensors and their gradients
in fp32, two moments per trained element (4 bytes each, or 1 and an fp32 scale per 256 in 8 bits), the batch.

*Kept from the forward pass for the backward pass*, per layer and row, all linear weights being frozen (the product of
two activations keeps both, a frozen linear layer keeps no input):

* two norms: 4 D each (their input in fp32);
* LoRA's and the router's input: see ``_adapter_bytes``;
* attention: rotated query, key, value and output, e each, a log-sum per head, and a layer's own e-byte copy of the
  [M, M] mask where records are padded (batch > 1) or the context is split; keys and values are repeated to the query's
  width where a mask meets grouped queries;
* routing: the value before the mask and the mask, e v each; scores in fp32;
* MLP: gate, its SiLU, up: 3 e F.

With checkpointing: e D per layer and row, and one layer in full, being recomputed.

*On top of that, whichever is larger*: the loss (logits, then log-probabilities and their gradients in fp32 for labelled
rows), or the backward pass of one MLP (three gradients of e F, or one and a dequantised weight).

Left out: allocator slack, CUDA context and library workspaces (about 1 GB on a GPU), the vision tower and the scout,
which run before anything is kept. Stage 2 of two-stage training keeps less (no q/v LoRA trains) and is counted alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

from torch import nn

from subtoken_train.backbones.attach import CompressedBackbone
from subtoken_train.functional.quantized import Quantization, dense_shape, quantised_bytes
from subtoken_train.training.optimizer import MIN_8BIT_ELEMENTS, OptimizerName

FP32_BYTES = 4
_STATE_BLOCK = 256
Sharding = Literal["none", "zero1", "zero2", "zero3", "fsdp2"]
"""What a strategy divides over its processes: nothing (one device, DDP); the optimiser's state; gradients too; all."""


@dataclass(frozen=True)
class Step:
    """A step as far as its memory depends on it.

    Attributes:
        batch_size: records of one forward pass on one device.
        length: positions of a record before the reducer.
        compressed: of them, tokens of the image or the context.
        labelled: positions of a record with a loss.
        pixel_bytes: of a record's image.
        checkpointing: decoder layers are recomputed in the backward pass.
        autocast: the trainer's precision is ``bf16-mixed`` or ``16-mixed``.
        dropout: LoRA has dropout.
        quantization: of the decoder's linear layers.
        optimizer: its name.
        sharding: what the strategy divides, over ``processes``.
        processes: of the run.
    """

    batch_size: int
    length: int
    compressed: int
    labelled: int
    pixel_bytes: int = 0
    checkpointing: bool = False
    autocast: bool = False
    dropout: bool = True
    quantization: Quantization = "none"
    optimizer: OptimizerName = "adamw"
    sharding: Sharding = "none"
    processes: int = 1


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose.

    Attributes:
        rows: positions of one record before and after the reducer.
        parts: (what it is, bytes), in the order of a report.
    """

    rows: tuple[int, int]
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(size for _, size in self.parts)


def estimate_memory(parts: CompressedBackbone, step: Step) -> MemoryEstimate:
    """The prediction of the module's text, for a model that is loaded or laid out.

    Raises:
        ValueError: a record holds no more than the image.
    """
    if step.length <= step.compressed:
        raise ValueError(
            f"max_length={step.length} leaves no room for text beside the {step.compressed} tokens of an image"
        )
    # context is evicted from caches; its rows still run
    dropped = 0 if parts.reducer.stage == "context" else step.compressed - parts.reducer.kept_tokens(step.compressed)
    left = step.length - dropped
    layers = parts.family.shape.num_layers
    rows = [step.length if layer < parts.reducer.cut_layer else left for layer in range(layers)]
    sizes = _Sizes(parts, step)
    kept = sum(sizes.layer(count) for count in rows)
    backward = sizes.backward(max(rows))
    if step.checkpointing:
        kept, backward = sum(sizes.input(count) for count in rows), sizes.layer(max(rows)) + backward
    trained = [parameter.numel() for parameter in parts.parameters() if parameter.requires_grad]
    divided = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}[step.sharding]
    share = [step.processes if level < divided else 1 for level in range(3)]
    weights = _frozen_bytes(parts, step.quantization)
    state = sum(_state_bytes(count, step.optimizer) for count in trained)
    batch = step.batch_size * (step.pixel_bytes + 3 * 8 * step.length)
    return MemoryEstimate(
        (step.length, left),
        (
            ("frozen weights", ceil(weights / share[2])),
            ("LoRA + routers", ceil(sum(trained) * FP32_BYTES / share[2])),
            ("gradients", ceil(sum(trained) * FP32_BYTES / share[1])),
            ("optimiser state", ceil(state / share[0])),
            ("batch", batch),
            ("kept for backward", step.batch_size * (kept + sizes.head(left))),
            ("loss or backward", max(step.batch_size * sizes.loss(left), step.batch_size * backward + sizes.weight())),
        ),
    )


class _Sizes:
    """Bytes of one record's activations, by row count."""

    def __init__(self, parts: CompressedBackbone, step: Step) -> None:
        shape, config = parts.family.shape, parts.family.decoder.config
        self.step, self.bank, self.splits = step, parts.bank if parts.routes else None, parts.splits
        self.element, self.hidden, self.mlp = shape.element_bytes, config.hidden_size, config.intermediate_size
        self.heads, self.vocabulary = config.num_attention_heads, config.vocab_size
        self.query, self.value = self.heads * shape.head_dim, shape.value_dim
        self.rank = next(iter(parts.family.decoder.layers[0].self_attn.q_proj.r.values()))

    def input(self, rows: int) -> int:
        """What checkpointing keeps of a layer: its input, and the masks of its values."""
        return rows * (self.element * self.hidden + (0 if self.bank is None else self.bank.config.num_groups))

    def layer(self, rows: int) -> int:
        """What the backward pass of a layer needs."""
        e, padded = self.element, self.splits or self.step.batch_size > 1
        repeated = padded and not self.splits
        key_value = 2 * (self.query if repeated else self.value)
        attention = e * (2 * self.query + key_value) + FP32_BYTES * self.heads
        mask = e * rows * rows if padded else 0
        norms = 2 * FP32_BYTES * self.hidden
        return rows * (norms + self._adapters() + attention + self._routing() + 3 * e * self.mlp) + mask

    def _adapters(self) -> int:
        """Inputs of LoRA on q and v and of the router, per row.

        Each LoRA keeps its own copy, in bf16 under autocast and in fp32 without; dropout keeps a byte more per element.
        Only without dropout and with an fp32 backbone is it the norm's output itself, kept once for all. The router
        reads fp32.
        """
        own = self.element if self.step.autocast else FP32_BYTES
        learned = self.bank is not None and self.bank.learned
        inner = 2 * self.rank * own
        if self.element == FP32_BYTES and not self.step.dropout:
            return FP32_BYTES * self.hidden + inner
        lora = 2 * self.hidden * (own + (1 if self.step.dropout else 0))
        return lora + inner + (FP32_BYTES * self.hidden if learned else 0)

    def _routing(self) -> int:
        """Values, mask and scores of a routed layer, per row."""
        if self.bank is None:
            return 0
        kept = 2 if self.bank.learned else 1
        return kept * self.element * self.value + 5 * FP32_BYTES * self.bank.config.num_groups

    def head(self, rows: int) -> int:
        """The final norm's input."""
        return rows * FP32_BYTES * self.hidden

    def loss(self, rows: int) -> int:
        """The largest moment of logits, cross-entropy and their gradients."""
        labelled, e = self.step.labelled, self.element
        forward = rows * e + labelled * 2 * FP32_BYTES
        return self.vocabulary * max(forward, labelled * 3 * FP32_BYTES, 2 * rows * e)

    def backward(self, rows: int) -> int:
        """Gradients inside the MLP of the layer that is at work."""
        return rows * self.element * (3 * self.mlp + 2 * self.hidden)

    def weight(self) -> int:
        """The largest weight, dequantised for its backward product."""
        return 0 if self.step.quantization == "none" else self.element * self.mlp * self.hidden


def _frozen_bytes(parts: CompressedBackbone, quantization: Quantization) -> int:
    """Weights that do not train, as they are held on the device."""
    inside = {id(module.weight) for module in parts.family.decoder.layers.modules() if isinstance(module, nn.Linear)}
    total = 0
    for parameter in parts.parameters():
        if parameter.requires_grad:
            continue
        if quantization != "none" and id(parameter) in inside:
            total += quantised_bytes(*dense_shape(parameter), quantization)
        else:
            total += parameter.numel() * parameter.element_size()
    return total


def _state_bytes(elements: int, optimizer: OptimizerName) -> int:
    """AdamW's two moments of a tensor."""
    if optimizer == "adamw" or elements < MIN_8BIT_ELEMENTS:
        return 2 * FP32_BYTES * elements
    return 2 * (elements + FP32_BYTES * ceil(elements / _STATE_BLOCK))
