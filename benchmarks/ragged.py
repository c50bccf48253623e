"""Decoding where heads keep unequal numbers of entries, against a cache of the same bytes with equally many each.

    OMP_NUM_THREADS=1 python benchmarks/ragged.py                   # CPU, fp32

The model of ``decode.py``. *even*: every head of every layer keeps N entries of random keys and values. *ragged*: the
heads of a layer keep 0.25 N to 1.75 N, in equal steps, in another order in every layer, N on average: an Ada-style
cache at its most uneven. Both in turns in one process, whole and routed (S16K4), as the attention of one layer and as a
whole decoding step. Seconds are those of the process, so that neighbours on the machine do not count.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode import GROUPS, KEPT, LAYERS, Decoder
from benchmarks.pairs import cell, hardware, interleaved, ratio, write
from benchmarks.shaped import HEAD_DIM, HEADS
from subtoken_train.cache.cache import PackedCache
from subtoken_train.cache.pack import Packing, pack_layer
from subtoken_train.engine.prompt_pass import layer_plan

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = (1024, 8192)
SPREAD = (0.25, 1.75)


def filled(decoder: Decoder, counts: list[list[int]], routed: bool) -> PackedCache:
    """A cache whose heads keep ``counts`` of each layer; a set for all heads where they are equal."""
    cache = PackedCache(LAYERS)
    for layer, counts_h in zip(cache.layers, counts, strict=True):
        length = max(counts_h)
        key, value = decoder.states(length)
        keep = torch.arange(length) < torch.tensor(counts_h)[:, None]
        groups = None
        if routed:
            chosen = torch.rand(1, length, GROUPS).argsort(-1)[..., :KEPT]
            groups = torch.zeros(1, length, GROUPS, dtype=torch.bool).scatter_(2, chosen, True)
        keep = keep[:1] if len(set(counts_h)) == 1 else keep
        layer.store_prompt(pack_layer(key, value, layer_plan(keep[None], groups), Packing()), length, key)
    cache.next_position = torch.tensor([[max(map(max, counts))]])
    cache.origin_B = torch.zeros(1, dtype=torch.long)
    return cache


@torch.no_grad()
def measure(decoder: Decoder, entries: int, routed: bool, pairs: int) -> dict[str, Any]:
    """One row: milliseconds, ratios and bytes at ``entries`` a head."""
    shares, generator = torch.linspace(*SPREAD, HEADS), torch.Generator().manual_seed(0)
    orders = [torch.randperm(HEADS, generator=generator) for _ in range(LAYERS)]
    uneven = [[int(entries * float(share)) for share in shares[order]] for order in orders]
    caches = {
        "ragged": filled(decoder, uneven, routed),
        "even": filled(decoder, [[entries] * HEADS] * LAYERS, routed),
    }
    layers, scale = {name: cache.layers[0] for name, cache in caches.items()}, HEAD_DIM**-0.5
    query, new = torch.randn(1, HEADS, 1, HEAD_DIM), torch.randn(1, HEADS, 16, HEAD_DIM)
    steps = interleaved({n: lambda c=c: decoder.step(c) for n, c in caches.items()}, pairs, clock=time.process_time)
    for layer in layers.values():
        layer.update(new, new)
    attends = {n: lambda layer=layer: layer.attend(query, scale) for n, layer in layers.items()}
    attention = interleaved(attends, pairs, clock=time.process_time)
    held = {n: sum(layer.payload_bytes + layer.index_bytes for layer in cache.layers) for n, cache in caches.items()}
    return {
        "entries": entries,
        "values": f"S{GROUPS}K{KEPT}" if routed else "whole",
        "step_ms": {name: round(1000 * sorted(values)[len(values) // 2], 3) for name, values in steps.items()},
        "attention_ms": {name: round(1000 * sorted(values)[len(values) // 2], 3) for name, values in attention.items()},
        "step": ratio(steps, "ragged", "even"),
        "attention": ratio(attention, "ragged", "even"),
        "bytes": held["ragged"] / held["even"],
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """Make the table of ``docs/speed.md``."""
    lines = [
        "| entries a head | values | step, ragged / even | attention, ragged / even | bytes |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        figures = f"{cell(tuple(row['step']))} | {cell(tuple(row['attention']))} | {row['bytes']:.3f}"
        lines.append(f"| {row['entries']:,} | {row['values']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", nargs="+", type=int, default=list(ENTRIES))
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/speed/ragged-cpu-float32.json")
    args = parser.parse_args()
    decoder, rows = Decoder("cpu", torch.float32), []
    for entries in args.entries:
        for routed in (False, True):
            rows.append(measure(decoder, entries, routed, args.pairs))
            print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    write({"hardware": hardware(), "pairs": args.pairs, "clock": "process time", "rows": rows}, args.out)


if __name__ == "__main__":
    main()
