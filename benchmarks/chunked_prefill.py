"""Peak memory and seconds of a prompt's pass, whole and in chunks.

    OMP_NUM_THREADS=1 python benchmarks/chunked_prefill.py

A random LLaMA-shaped language model (d = 512, 8 heads of 64, MLP of 1,408, 4 layers, fp32) runs one prompt to a packed
cache, each time in a process of its own: with an eviction at a tenth of the entries, and with routers (S16K4), whose
context split needs an N x N mask when it runs whole (5 GiB at 32,768 tokens: left out). *added* is what the pass adds
to the process's peak; weights and libraries are not counted, everything else is: dense states, masks, what kernels
take, the packed cache itself.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.pairs import hardware, write
from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.families.text import TextFamily
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import prefill
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank
from subtoken_train.types import Batch, Region

RESULT = Path(__file__).resolve().parents[1] / "benchmarks/results/speed/chunked-prefill-cpu-float32.json"
LAYERS, KEEP, QUERY = 4, 0.1, 64
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "vocab_size": 64,
}
CASES = [
    ("snapkv", 32768, (None, 4096, 1024)),
    ("routed", 8192, (None, 4096, 1024)),
]
"""What acts, tokens, and rows at a time; None: all."""


def prompt(length: int) -> Batch:
    """A context with a question of ``QUERY`` tokens behind it."""
    regions = torch.full((1, length), int(Region.CONTEXT))
    regions[:, 0], regions[:, -QUERY:] = int(Region.SYSTEM), int(Region.QUERY)
    ids = torch.randint(1, 64, (1, length), generator=torch.Generator().manual_seed(0))
    none = torch.zeros(1, dtype=torch.long)
    return Batch(ids, torch.full_like(ids, -100), regions, torch.tensor([length - 1]), None, none, ["prompt"])


def added(what: str, length: int, chunk: int | None) -> dict[str, float]:
    """Bytes that a pass adds to the peak of this process, its seconds, and the bytes of its packed cache."""
    torch.manual_seed(0)
    family = TextFamily(LlamaForCausalLM(LlamaConfig(max_position_embeddings=length, **SHAPE)).eval(), None)
    routed = what == "routed"
    bank = RouterBank(RoutingConfig(), family.hidden_size, family.shape) if routed else None
    backbone = CompressedBackbone(family, build_reducer("none"), bank).eval()
    method = None if routed else build_eviction(what)
    compression = Compression(method, 1.0 if routed else KEEP, prefill_chunk=chunk)
    prefill(backbone, prompt(256), PackedCache(LAYERS), compression)  # what is loaded at first use
    batch, cache = prompt(length), PackedCache(LAYERS)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    prefill(backbone, batch, cache, compression)
    seconds = time.perf_counter() - start
    peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {"added": peak, "seconds": seconds, "cache": sum(layer.payload_bytes for layer in cache.layers)}


def table(record: dict[str, Any]) -> str:
    """A row per pass."""
    lines = [
        "| acts | tokens | rows at a time | added to the peak | seconds | packed cache |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        size = "all" if row["chunk"] is None else f"{row['chunk']:,}"
        lines.append(
            f"| {row['acts']} | {row['tokens']:,} | {size} | {row['added'] / 2**20:,.0f} MiB | {row['seconds']:.0f} | "
            f"{row['cache'] / 2**20:,.0f} MiB |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        what, length, chunk = args.one
        print(json.dumps(added(what, int(length), None if chunk == "all" else int(chunk))))
        return
    rows = []
    for what, length, chunks in CASES:
        for chunk in chunks:
            command = [sys.executable, __file__, "--one", what, str(length), "all" if chunk is None else str(chunk)]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            rows.append({"acts": what, "tokens": length, "chunk": chunk, **found})
            print(json.dumps(rows[-1]), flush=True)
            record = {"hardware": hardware(), "layers": LAYERS, "keep": KEEP, "rows": rows}
            write(record, RESULT)
    print(table(record))


if __name__ == "__main__":
    main()
