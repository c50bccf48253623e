"""Decoding steps of rounded caches against unrounded ones, and of a batch of unequal rows against equal ones.

    OMP_NUM_THREADS=1 python benchmarks/decode_kinds.py             # CPU, fp32

The model of ``decode.py``. *rounded*: S16K4 and whole values at N entries, int8 and int4 against fp32. *rows*: eight
samples that keep 0.25 N to 1.75 N entries against eight that keep N, the same number in all. Both sides in turns in one
process; seconds are those of the process, so that neighbours on the machine count less.
"""

from __future__ import annotations

import argparse
import os
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
from subtoken_train.kernels.formats import FORMATS, MODEL, Format

ROOT = Path(__file__).resolve().parents[1]
SPREAD, BATCH = (0.25, 1.75), 8


def filled(counts: list[int], routed: bool, form: Format = MODEL) -> PackedCache:
    """A cache whose samples keep ``counts`` entries of random keys and values."""
    cache, batch, length = PackedCache(LAYERS), len(counts), max(counts)
    keep = torch.arange(length) < torch.tensor(counts)[:, None]
    for layer in cache.layers:
        key, value = (torch.randn(batch, HEADS, length, HEAD_DIM) for _ in range(2))
        groups = None
        if routed:
            chosen = torch.rand(batch, length, GROUPS).argsort(-1)[..., :KEPT]
            groups = torch.zeros(batch, length, GROUPS, dtype=torch.bool).scatter_(2, chosen, True)
        layer.store_prompt(pack_layer(key, value, layer_plan(keep[:, None], groups), Packing(form=form)), length, key)
    cache.next_position = torch.full((batch, 1), length)
    cache.origin_B = torch.zeros(batch, dtype=torch.long)
    cache.appends = True  # by transformers' own forward, which is timed here
    return cache


@torch.no_grad()
def measure(decoder: Decoder, caches: dict[str, PackedCache], pairs: int) -> dict[str, Any]:
    """Ratios of steps and of one layer's attention to those of the first cache."""
    decoder.token = torch.zeros(len(caches["base"].origin_B), 1, dtype=torch.long)
    steps = interleaved({n: lambda c=c: decoder.step(c) for n, c in caches.items()}, pairs, clock=time.process_time)
    query = torch.randn(len(decoder.token), HEADS, 1, HEAD_DIM)
    new = torch.randn(len(decoder.token), HEADS, 1, HEAD_DIM)
    for cache in caches.values():
        cache.layers[0].update(new, new)
    attends = {n: lambda c=c: c.layers[0].attend(query, HEAD_DIM**-0.5) for n, c in caches.items()}
    attention = interleaved(attends, pairs, clock=time.process_time)
    others = [name for name in caches if name != "base"]
    return {
        "step": {name: ratio(steps, name, "base") for name in others},
        "attention": {name: ratio(attention, name, "base") for name in others},
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounded", nargs="*", type=int, default=[8192])
    parser.add_argument("--rows", nargs="*", type=int, default=[256, 1024])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/speed/decode_kinds-cpu-float32.json")
    args = parser.parse_args()
    decoder, rows = Decoder("cpu", torch.float32), []
    for kind, lengths in (("rounded", args.rounded), ("rows", args.rows)):
        for entries in lengths:
            for routed in (True, False):
                if kind == "rounded":
                    kinds = {"base": MODEL, "int8": FORMATS["int8"], "int4": FORMATS["int4"]}
                    caches = {name: filled([entries], routed, form) for name, form in kinds.items()}
                else:
                    uneven = [int(entries * share) for share in torch.linspace(*SPREAD, BATCH).tolist()]
                    caches = {"base": filled([entries] * BATCH, routed), "unequal": filled(uneven, routed)}
                load = os.getloadavg()[0]
                row = {"kind": kind, "entries": entries, "values": f"S{GROUPS}K{KEPT}" if routed else "whole"}
                rows.append(row | measure(decoder, caches, args.pairs) | {"load": round(load, 1)})
                for part in ("step", "attention"):
                    figures = ", ".join(f"{name} {cell(figure)}" for name, figure in rows[-1][part].items())
                    print(kind, entries, row["values"], part, figures, flush=True)
    write({"hardware": hardware(), "pairs": args.pairs, "clock": "process time", "rows": rows}, args.out)


if __name__ == "__main__":
    main()
