"""Interleaved rounds over the sides of a comparison: prompt, then forced tokens; bytes and peak memory in a first pass.

A ratio is a median over rounds of one side's seconds over another's in the same round, with a 95 % bootstrap interval.
Memory is read before the rounds, with no other side's cache alive: on a GPU the allocator's peak, elsewhere the peak of
live tensors (``LiveTensors``). Both count weights, routers and prompts.
"""

import os
import platform
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from subtoken_train.benchmarking.sides import PackedSide, Side

RESAMPLES = 2000
WARMUP = 1
"""Rounds of a comparison before those that count."""


def turns(names: Sequence[str], pairs: int, warmup: int) -> Iterator[tuple[str, bool]]:
    """Yield the name whose turn it is, and True if it counts; a round has each name once, in an alternating order."""
    for turn in range(warmup + pairs):
        for name in names if turn % 2 == 0 else names[::-1]:
            yield name, turn >= warmup


def ratio(seconds: Mapping[str, list[float]], ours: str, theirs: str) -> tuple[float, float, float]:
    """Return the median over rounds of ours / theirs, with its 95 % bootstrap interval."""
    return middle(np.array(seconds[ours]) / np.array(seconds[theirs]))


def middle(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the median, with its 95 % bootstrap interval."""
    medians = np.median(values[np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def cell(figures: Sequence[float]) -> str:
    """Write a figure as ``0.52 [0.51, 0.54]``."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(*figures)


def hardware() -> dict[str, Any]:
    """Describe the hardware that this ran on."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"(?m)^model name\s*: (.*)$", info.read_text()) if info.exists() else []
    return {
        "cpu": names[0].strip() if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
    }


def synchronise() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class LiveTensors(TorchDispatchMode):
    """Counts live storages once each, ``held`` from the start; one thread (a CPU), blind inside a kernel."""

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        TorchDispatchMode.__init__(self)
        self.live = self.peak = 0
        self._known = WeakIdKeyDictionary()
        for tensor in held:
            self._follow(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        return made

    def _follow(self, tensor: Tensor) -> None:
        if (storage := tensor.untyped_storage()) in self._known:
            return
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        self._known[storage] = weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.live -= size


def tensors_of(module: torch.nn.Module) -> list[Tensor]:
    """Return parameters and buffers, and what bitsandbytes keeps beside a quantised weight."""
    found = [*module.parameters(), *module.buffers()]
    for parameter in module.parameters():
        if (state := getattr(parameter, "quant_state", None)) is not None:
            nested = state.state2
            found += [state.absmax, state.code, state.offset, nested.absmax, nested.code]
        found += [scales for scales in (getattr(parameter, "SCB", None),) if scales is not None]
    return found


Clock = Callable[[], float]
PEAK_ON_GPU = "torch.cuda.max_memory_allocated over prompt and steps: weights, prompts, cache, activations"
PEAK_ELSEWHERE = (
    "peak of live tensors over prompt and steps: weights, prompts, cache, activations; a kernel's own scratch memory "
    "is not seen"
)


@dataclass
class SideFigures:
    """Measurements of one side: bytes after the prompts and after the last step, seconds of every round."""

    words: str
    kernel: str
    entries: int
    prompt_bytes: dict[str, int]
    final_bytes: dict[str, int]
    peak_bytes: int
    prefill_seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


def run_side(side: Side, new_tokens: int, clock: Clock = time.perf_counter) -> tuple[float, float]:
    """Time a side's prompts and its forced steps together, in seconds, inside its turn."""
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
    sides: Sequence[Side],
    new_tokens: int,
    pairs: int,
    warmup: int = WARMUP,
    clock: Clock = time.perf_counter,
    ran: Callable[[], object] = lambda: None,
) -> dict[str, SideFigures]:
    """Measure all sides, by name; ``ran`` is called after every run of a side, for its memory or of a round."""
    figures, by_name = dict[str, SideFigures](), {side.name: side for side in sides}
    for side in sides:
        figures[side.name] = hold(side, new_tokens)
        ran()
    for name, counts in turns(list(by_name), pairs, warmup):
        with by_name[name].turn():
            prompt, steps = run_side(by_name[name], new_tokens, clock)
        if counts:
            figures[name].prefill_seconds.append(prompt)
            figures[name].step_seconds.append(steps / new_tokens)
        ran()
    return figures


def hold(side: Side, new_tokens: int) -> SideFigures:
    """Measure bytes and peak memory of a side, without a clock."""
    prompts, bank = side.prompts, side.bank if isinstance(side, PackedSide) else None
    device = prompts.input_ids_BN.device
    held = [tensor for tensor in vars(prompts).values() if isinstance(tensor, Tensor)]
    held += tensors_of(side.family.model) + ([] if bank is None else tensors_of(bank))
    if on_gpu := device.type == "cuda":
        synchronise()
        torch.cuda.reset_peak_memory_stats(device)
    live: Any = nullcontext() if on_gpu else LiveTensors(held)
    with side.turn():
        with live:
            logits_BV = side.prefill()
        before, entries = side.held(), side.entries()
        with live:
            force(side, logits_BV, new_tokens)
        synchronise()
        peak = torch.cuda.max_memory_allocated(device) if on_gpu else live.peak
        return SideFigures(side.words, side.kernel(), entries, before, side.held(), peak)


def ratios(figures: dict[str, SideFigures], ours: str) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Return, for ``prefill`` and ``step``, the ratio of one side to each other one: (median, low, high)."""
    made: dict[str, dict[str, tuple[float, float, float]]] = {}
    for part in ("prefill", "step"):
        seconds = {name: getattr(found, f"{part}_seconds") for name, found in figures.items()}
        made[part] = {other: ratio(seconds, ours, other) for other in seconds if other != ours}
    return made
