"""Interleaved rounds over the sides of a comparison: prompt, then forced tokens; bytes and peak memory in a first pass.

Every round runs each side once, in an order that alternates: its prompts' pass, then as many steps as asked for, each
on the likeliest token of the one before, end-of-text or not. A ratio is a median over rounds of one side's seconds over
another's in the same round, with a 95 % bootstrap interval.

Memory is read in a pass of its own, before the rounds, with no other side's cache alive: on a GPU the allocator's peak;
elsewhere the peak of live tensors, followed operation by operation, which does not see what a kernel allocates and
frees inside. Both count weights, routers and the prompts.

What it does not do: requests that come and go, sampling, texts of unequal length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from subtoken_train.benchmarking.live_tensors import LiveTensors, tensors_of
from subtoken_train.benchmarking.pairs import ratio, synchronise, turns
from subtoken_train.benchmarking.sides import HeldBytes, PackedSide, Side

Clock = Callable[[], float]
PEAK_ON_GPU = "torch.cuda.max_memory_allocated over prompt and steps: weights, prompts, cache, activations"
PEAK_ELSEWHERE = (
    "peak of live tensors over prompt and steps: weights, prompts, cache, activations; a kernel's own scratch memory "
    "is not seen"
)


@dataclass
class SideFigures:
    """What was measured of a side.

    Attributes:
        words: what the side is.
        kernel: what attends in its steps.
        entries: of a sample's prompt in the last layer.
        prompt_bytes: the cache right after the prompts.
        final_bytes: the cache after the last step.
        peak_bytes: see the module's text.
        prefill_seconds: of every round.
        step_seconds: of every round, one step's share.
    """

    words: str
    kernel: str
    entries: int
    prompt_bytes: HeldBytes
    final_bytes: HeldBytes
    peak_bytes: int
    prefill_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        held = {name: {**asdict(of), "total": of.total} for name, of in self._held()}
        return {**asdict(self), **held}

    def _held(self) -> tuple[tuple[str, HeldBytes], ...]:
        return ("prompt_bytes", self.prompt_bytes), ("final_bytes", self.final_bytes)


def run_side(side: Side, new_tokens: int, clock: Clock = time.perf_counter) -> tuple[float, float]:
    """Seconds of a side's prompts and of its forced steps together; inside its turn."""
    synchronise()
    start = clock()
    logits_BV = side.prefill()
    synchronise()
    middle = clock()
    force(side, logits_BV, new_tokens)
    synchronise()
    return middle - start, clock() - middle


def force(side: Side, logits_BV: Tensor, new_tokens: int) -> None:
    """Go on with the likeliest token, whatever it is; the host waits for none of them."""
    for _ in range(new_tokens):
        logits_BV = side.step(logits_BV.argmax(-1)[:, None])


def measure(
    sides: Sequence[Side], new_tokens: int, pairs: int, warmup: int = 1, clock: Clock = time.perf_counter
) -> dict[str, SideFigures]:
    """All figures of all sides, by name."""
    figures = {side.name: hold(side, new_tokens) for side in sides}
    by_name = {side.name: side for side in sides}
    for name, counts in turns(list(by_name), pairs, warmup):
        with by_name[name].turn():
            prompt, steps = run_side(by_name[name], new_tokens, clock)
        if counts:
            figures[name].prefill_seconds.append(prompt)
            figures[name].step_seconds.append(steps / new_tokens)
    return figures


def hold(side: Side, new_tokens: int) -> SideFigures:
    """Bytes and peak memory of a side, without a clock."""
    prompts = side.prompts
    on_gpu = prompts.input_ids_BN.device.type == "cuda"
    bank = side.bank if isinstance(side, PackedSide) else None
    held = [tensor for tensor in vars(prompts).values() if isinstance(tensor, Tensor)]
    held += tensors_of(side.family.model) + ([] if bank is None else tensors_of(bank))
    with side.turn():
        if on_gpu:
            synchronise()
            torch.cuda.reset_peak_memory_stats(prompts.input_ids_BN.device)
            logits_BV = side.prefill()
            before, entries = side.held(), side.entries()
            force(side, logits_BV, new_tokens)
            synchronise()
            peak = torch.cuda.max_memory_allocated(prompts.input_ids_BN.device)
        else:
            with LiveTensors(held) as live:
                logits_BV = side.prefill()
            before, entries = side.held(), side.entries()
            with live:
                force(side, logits_BV, new_tokens)
            peak = live.peak
        return SideFigures(side.words, side.kernel(), entries, before, side.held(), peak)


def ratios(figures: dict[str, SideFigures], ours: str) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Of ``prefill`` and ``step``: one side over each other one, (median, low, high)."""
    made: dict[str, dict[str, tuple[float, float, float]]] = {}
    for part in ("prefill", "step"):
        seconds = {name: getattr(found, f"{part}_seconds") for name, found in figures.items()}
        made[part] = {other: ratio(seconds, ours, other) for other in seconds if other != ours}
    return made


def middle_ms(seconds: Sequence[float]) -> float:
    """Median in milliseconds."""
    return 1000 * median(seconds)
