"""Peak memory of a training step on one device, predicted from a recipe before anything is loaded.

Counted are live tensors: what benchmarks/training_memory.py measures and docs/memory.md compares. The formulas follow
what autograd keeps, op by op; no factor is fitted.

*Held all the time*: frozen weights (``functional/quantized.py`` for 4 and 8 bits), trained tensors and their gradients
in fp32, two moments per trained element (4 bytes each, or 1 and an fp32 scale per 256 in 8 bits), the batch.

*Kept from the forward pass for the backward pass*, and *on top of that*, the loss or a backward product, whichever is
larger: ``activation_memory.py``.

*Before all of that*, without gradient: the vision tower (``Family.tower_bytes``), and with distillation the teacher's
pass over all rows. They count where one needs more than everything that follows. The teacher's logits stay until the
loss.

Left out: allocator slack, CUDA context and library workspaces (about 1 GB on a GPU), DDP's copy of the gradients, and
the scout, which holds less than a layer in full. Stage 2 of two-stage training keeps less (no q/v LoRA trains) and is
counted alike. What ZeRO-3 and FSDP2 share out is divided evenly, with one decoder layer gathered; not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from operator import itemgetter
from typing import Any

from torch import nn

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.images import FP32_BYTES
from subtoken_train.functional.quantized import Quantization, dense_shape, quantised_bytes
from subtoken_train.training.activation_memory import ActivationBytes, Step
from subtoken_train.training.optimizer import MIN_8BIT_ELEMENTS, OptimizerName

_STATE_BLOCK = 256
_DIVIDED = {"zero1": 1, "zero2": 2, "zero3": 3, "zero3_offload": 3, "fsdp2": 3}
"""What strategies divide over processes: 1 the optimiser's state, 2 gradients too, 3 weights too; others nothing."""


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
    counts = parts.reducer.layer_tokens(step.compressed, parts.family.shape.num_layers)
    if parts.reducer.stage == "context":  # evicted from caches; its rows still run
        counts = [step.compressed] * len(counts)
    rows = [step.length - step.compressed + count for count in counts]
    sizes = ActivationBytes(parts, step)
    kept = sum(sizes.layer(count) for count in rows) - sizes.first(rows[0])
    backward = sizes.backward(max(rows))
    if step.checkpointing:
        kept = sum(sizes.input(count) for count in rows)
        backward += step.batch_size * sizes.layer(max(rows))
    kept *= step.batch_size
    working = max(step.batch_size * sizes.loss(), backward)
    tower = step.batch_size * (parts.family.tower_bytes(step.pixel_bytes) if step.pixel_bytes else 0)
    phases: tuple[tuple[str, int], ...] = (("kept for backward", kept), ("loss or backward", working))
    before = ("vision tower", tower)
    if step.distilled:
        held = step.batch_size * sizes.teacher_logits()
        phases = (("teacher's logits", held), *phases)
        before = max(before, ("teacher's pass", step.batch_size * sizes.teacher(step.length) + held), key=itemgetter(1))
    return MemoryEstimate(
        (step.length, rows[-1]),
        (
            *_held(parts, step),
            ("batch", step.batch_size * (step.pixel_bytes + 3 * 8 * step.length)),
            *(phases if sum(size for _, size in phases) >= before[1] else (before,)),
        ),
    )


def check_strategy(quantization: str, strategy: Any) -> None:
    """Raise a worded ``ValueError`` where a strategy would share out weights that are held in 4 or 8 bits."""
    if quantization != "none" and isinstance(strategy, str) and _DIVIDED.get(strategy, 0) == 3:
        raise ValueError(
            f"trainer.strategy {strategy} divides the weights over processes, which weights of quantization "
            f"{quantization!r} do not survive; take ddp or zero2, or model.backbone.quantization: none"
        )


def _held(parts: CompressedBackbone, step: Step) -> Iterator[tuple[str, int]]:
    """Weights, gradients and the optimiser's state on one of the processes."""
    divided = _DIVIDED.get(step.strategy, 0)
    share = [step.processes if level < divided else 1 for level in range(3)]
    host = step.strategy == "zero3_offload"
    trained = [parameter.numel() for parameter in parts.parameters() if parameter.requires_grad]
    weights, layer = _frozen_bytes(parts, step.quantization)
    state = sum(_state_bytes(count, step.optimizer) for count in trained)
    yield "frozen weights", 0 if host else ceil(weights / share[2])
    if divided == 3:
        yield "a gathered layer", layer
    yield "LoRA + routers", 0 if host else ceil(sum(trained) * FP32_BYTES / share[2])
    yield "gradients", ceil(sum(trained) * FP32_BYTES / share[1])
    yield "optimiser state", 0 if host else ceil(state / share[0])


def _frozen_bytes(parts: CompressedBackbone, quantization: Quantization) -> tuple[int, int]:
    """Weights that do not train, as they are held: all of them, and those of one decoder layer."""
    layers = parts.family.decoder.layers
    linear = {id(module.weight) for module in layers.modules() if isinstance(module, nn.Linear)}

    def held(module: nn.Module) -> int:
        total = 0
        for parameter in module.parameters():
            if quantization != "none" and id(parameter) in linear and not parameter.requires_grad:
                total += quantised_bytes(dense_shape(parameter), quantization)
            elif not parameter.requires_grad:
                total += parameter.numel() * parameter.element_size()
        return total

    return held(parts), held(layers[0])


def _state_bytes(elements: int, optimizer: OptimizerName) -> int:
    """AdamW's two moments of a tensor."""
    if optimizer == "adamw" or elements < MIN_8BIT_ELEMENTS:
        return 2 * FP32_BYTES * elements
    return 2 * (elements + FP32_BYTES * ceil(elements / _STATE_BLOCK))
