"""Decoding without the host: captured steps, and attention's share of a device copy.

A graph takes the launches off the clock, so that what is left is the work of the device. Without CUDA the same calls
run as they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.decode import GROUPS, KEPT, Decoder
from benchmarks.pairs import interleaved, middle, ratio
from benchmarks.shaped import HEAD_DIM, HEADS
from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.text import TextFamily
from subtoken_train.inference.decode_step import CapturedStep
from subtoken_train.inference.prefill import decode
from subtoken_train.reducers import build_reducer

WARMUP = 3


def on_cuda(device: str) -> bool:
    """Whether there are graphs."""
    return device.startswith("cuda")


def replayed(action: Callable[[], object], device: str) -> Callable[[], object]:
    """The action as a CUDA graph; without CUDA itself."""
    if not on_cuda(device):
        return action
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARMUP):
            action()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


@torch.no_grad()
def graphed_steps(decoder: Decoder, entries: int, pairs: int) -> dict[str, Any]:
    """Ratios of whole decoding steps: routed over the same entries, and over the same bytes, of whole values."""
    backbone = CompressedBackbone(TextFamily(decoder.model, None), build_reducer("none")).eval()

    same_bytes = int(entries * (1 + KEPT / GROUPS) / 2)
    caches = {
        "routed": decoder.packed(entries, routed=True),
        "token_only": decoder.packed(entries, routed=False),
        "same_bytes": decoder.packed(same_bytes, routed=False),
    }
    steps: dict[str, Callable[[Tensor, PackedCache], Tensor]] = dict.fromkeys(caches, partial(decode, backbone))
    if on_cuda(decoder.device):
        for name, cache in caches.items():
            cache.prepare()
            steps[name] = CapturedStep(backbone, cache, name, WARMUP + pairs)
    turns = {name: partial(steps[name], decoder.token, cache) for name, cache in caches.items()}
    seconds = interleaved(turns, pairs, WARMUP)
    return {
        "entries": entries,
        "step_ms": {name: 1000 * float(np.median(each)) for name, each in seconds.items()},
        "step_vs_token_only": ratio(seconds, "routed", "token_only"),
        "step_vs_same_bytes": ratio(seconds, "routed", "same_bytes"),
    }


@torch.no_grad()
def share_of_copy(decoder: Decoder, entries: int, pairs: int) -> dict[str, Any]:
    """What all layers' attention reads a second (each in turn, no warm cache), over what a device copy moves."""
    found: dict[str, Any] = {"entries": entries, "gigabytes_per_second": {}, "share": {}}
    query = torch.randn(1, HEADS, 1, HEAD_DIM, device=decoder.device, dtype=decoder.dtype)
    for name in ("routed", "token_only"):
        cache = decoder.packed(entries, routed=name == "routed")
        decoder.step(cache)

        def attend(cache: PackedCache = cache) -> None:
            for layer in cache.layers:
                layer.attend(query, HEAD_DIM**-0.5)

        size = sum(layer.payload_bytes + layer.index_bytes for layer in cache.layers)
        source = torch.empty(size, dtype=torch.uint8, device=decoder.device)
        target = torch.empty_like(source)
        copy = replayed(lambda source=source, target=target: target.copy_(source), decoder.device)
        seconds = interleaved({"attend": replayed(attend, decoder.device), "copy": copy}, pairs)
        rates = {"attend": size / np.array(seconds["attend"]), "copy": 2 * size / np.array(seconds["copy"])}
        found["gigabytes_per_second"][name] = {what: float(np.median(each)) / 1e9 for what, each in rates.items()}
        found["share"][name] = middle(rates["attend"] / rates["copy"])
    return found
