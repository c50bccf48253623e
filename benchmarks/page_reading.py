"""A decoding step's attention that reads chosen pages (Quest in every step) beside one that reads everything.

    OMP_NUM_THREADS=1 python benchmarks/page_reading.py       # ... writes results/speed/page_reading-cpu-float32.json

One layer, random keys and values of 8 heads of 128 (and 32 query heads on them), batch 1, pages of 16. Timed in turns
in one process: the packed cache read in full, torch's own attention on dense tensors, and chosen pages at several
budgets, the choice and the gathering included. Nothing is freed: the record names what is stored and what is read.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.pages import put
from benchmarks.pairs import cell, hardware, interleaved, ratio, write
from benchmarks.shaped import HEAD_DIM, HEADS
from subtoken_train.cache.pack import Packing, PageReading, pack_layer, with_pages
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.engine.prompt_pass import layer_plan

ROOT = Path(__file__).resolve().parents[1]
RECORD, PAGE = ROOT / "benchmarks/results/speed/page_reading-cpu-float32.json", ROOT / "docs/speed.md"
ENTRIES, GROUPS, BUDGETS = (2048, 8192, 32768), (1, 4), (0.5, 0.25, 0.125, 0.0625)


@torch.no_grad()
def measure(entries: int, group: int, rounds: int) -> dict[str, Any]:
    """One layer of one size."""
    torch.manual_seed(0)
    keys, values = (torch.randn(1, HEADS, entries, HEAD_DIM) for _ in range(2))
    query, new = torch.randn(1, HEADS * group, 1, HEAD_DIM), torch.randn(1, HEADS, 1, HEAD_DIM)
    everything = torch.ones(1, entries, dtype=torch.bool)
    blocks = pack_layer(keys, values, layer_plan(everything[:, None]), Packing())

    def layer_of(budget: float) -> PackedLayer:
        layer = PackedLayer()
        reading = PageReading(16, 1, everything, torch.tensor([int(entries * budget)]))
        layer.store_prompt(with_pages(blocks, reading), entries, keys)
        layer.chooses_pages = True
        layer.update(new, new)
        return layer

    layers = {"everything": layer_of(1.0)} | {str(budget): layer_of(budget) for budget in BUDGETS}
    dense = [torch.cat([states, new], 2) for states in (keys, values)]
    actions: dict[str, Any] = {
        name: lambda layer=layer: layer.attend(query, HEAD_DIM**-0.5) for name, layer in layers.items()
    }
    actions["sdpa"] = lambda: F.scaled_dot_product_attention(query, *dense, enable_gqa=group > 1)
    seconds = interleaved(actions, rounds)
    stored = {name: layer.payload_bytes + layer.index_bytes for name, layer in layers.items()}
    return {
        "entries": entries,
        "query_heads_per_head": group,
        "rounds": rounds,
        "everything_seconds": sorted(seconds["everything"])[rounds // 2],
        "stored_bytes": stored,
        "read_bytes": {name: stored[name] - layer.unread_bytes for name, layer in layers.items()},
        "over_everything": {name: ratio(seconds, name, "everything") for name in actions if name != "everything"},
    }


def table(record: dict[str, Any]) -> str:
    """Times over those of reading everything, and bytes read over bytes stored without an index."""
    names = ["sdpa", *map(str, BUDGETS)]
    heads = ["entries", "query heads a head", "reads all", "torch's own", *(f"reads {each:.4g}" for each in BUDGETS)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in record["cases"]:
        cells = []
        for name in names:
            share = case["read_bytes"].get(name, 0) / case["stored_bytes"]["everything"]
            cells.append(cell(case["over_everything"][name]) + (f", {share:.1%} of the bytes" if share else ""))
        first = [
            f"{case['entries']:,}",
            str(case["query_heads_per_head"]),
            f"{1e3 * case['everything_seconds']:.2f} ms",
        ]
        lines.append(f"| {' | '.join(first + cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write the record and the page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    cases = [measure(entries, group, rounds) for group in GROUPS for entries in ENTRIES]
    write({"hardware": hardware(), "cases": cases}, RECORD)
    made = table(json.loads(RECORD.read_text(encoding="utf-8")))
    put(PAGE, "page_reading", made)


if __name__ == "__main__":
    main()
