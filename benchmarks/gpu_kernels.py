"""Decoding without the host, in captured steps, and packing in one launch a layer.

A graph takes the launches off the clock, so that what is left is the work of the device. Without CUDA the same calls
run as they are.
"""

import os
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.decode import GROUPS, KEPT, Decoder
from benchmarks.pairs import interleaved, ratio
from benchmarks.prefill import Prompt
from benchmarks.shaped import llama_config
from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.text import TextFamily
from subtoken_train.inference.decode_step import CapturedStep
from subtoken_train.inference.prefill import decode_joined
from subtoken_train.kernels.choice import VARIABLE
from subtoken_train.kernels.formats import FORMATS
from subtoken_train.reducers import build_reducer

WARMUP = 3
ROUNDED = ("int4_rotated", "kivi4", "kivi2")


def graphed_steps(decoder: Decoder, caches: dict[str, list[PackedCache]], pairs: int) -> dict[str, list[float]]:
    """Seconds of whole decoding steps on some caches, or on several as one, in turns."""
    backbone, turns = CompressedBackbone(TextFamily(decoder.model, None), build_reducer("none")).eval(), {}
    for name, rows in caches.items():
        tokens = decoder.token.repeat(len(rows), 1)
        turns[name] = partial(decode_joined, backbone, tokens, rows)
        if decoder.device.startswith("cuda"):
            for cache in rows:
                cache.prepare()
            turns[name] = partial(CapturedStep(backbone, rows, [(WARMUP + pairs, name)] * len(rows)), tokens, *rows)
    return interleaved(turns, pairs, WARMUP)


@torch.no_grad()
def compared_steps(decoder: Decoder, entries: int, pairs: int) -> dict[str, Any]:
    """Ratios of steps: routed over the same entries, over the same bytes, of whole values; eight rows over one."""
    same_bytes = int(entries * (1 + KEPT / GROUPS) / 2)
    sizes = {"routed": (entries, True), "token_only": (entries, False), "same_bytes": (same_bytes, False)}
    caches = {name: [decoder.packed(*size)] for name, size in sizes.items()}
    caches["eight"] = [decoder.packed(*sizes["routed"]) for _ in range(8)]
    seconds = graphed_steps(decoder, caches, pairs)
    return {
        "entries": entries,
        "eight_rows_vs_one": ratio(seconds, "eight", "routed"),
        "step_ms": {name: 1000 * float(np.median(each)) for name, each in seconds.items()},
        "step_vs_token_only": ratio(seconds, "routed", "token_only"),
        "step_vs_same_bytes": ratio(seconds, "routed", "same_bytes"),
    }


@torch.no_grad()
def stored_steps(decoder: Decoder, entries: int, pairs: int) -> dict[str, Any]:
    """Ratios of routed steps on entries that are rounded, over the model's dtype."""
    caches = {name: [decoder.packed(entries, True, FORMATS[name])] for name in ("model", *ROUNDED)}
    seconds = graphed_steps(decoder, caches, pairs)
    return {"entries": entries, "ratios": {name: ratio(seconds, name, "model") for name in ROUNDED}}


@torch.no_grad()
def packed_prompts(device: str, dtype: torch.dtype, length: int, layers: int, pairs: int) -> dict[str, Any]:
    """Ratio of planning and packing a routed prompt by one launch a layer, over torch's operations."""
    prompt = Prompt(llama_config(layers, length, vocabulary=64), length, device, dtype)
    cache, visual = prompt.run(), torch.ones_like(prompt.regions).bool()
    chosen = torch.rand(*visual.shape, GROUPS, device=visual.device).argsort(-1).argsort(-1) < KEPT
    given = cache, [visual[:, None]] * len(cache.layers), dict.fromkeys(range(len(cache.layers)), chosen)

    def by_operations() -> None:
        with patch.dict(os.environ, {VARIABLE: "reference"}):
            prompt.packed(*given)

    seconds = interleaved({"one launch": lambda: prompt.packed(*given), "operations": by_operations}, pairs, WARMUP)
    return {"length": length, "seconds": seconds, "ratio": ratio(seconds, "one launch", "operations")}
