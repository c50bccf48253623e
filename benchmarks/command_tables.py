"""Markdown tables of the records that ``subtoken-train benchmark --out`` writes.

python benchmarks/command_tables.py benchmarks/results/speed/table8-scaled-cpu-float32.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.pairs import cell
from subtoken_train.benchmarking.rounds import middle_ms

COLUMNS = ("prompt", "batch", "side", "entries", "cache KiB", "peak MiB", "prefill ms", "step ms")


def table(record: dict[str, Any]) -> str:
    """A row per side, with the first side's ratios to it."""
    lines = ["| " + " | ".join((*COLUMNS, "prefill, ratio to it", "step, ratio to it")) + " |"]
    lines.append("|---" * (len(COLUMNS) + 2) + "|")
    for row in record["rows"]:
        prompt = row.get("table8", f"{row['prompt']['length']:,}")
        for name, side in row["sides"].items():
            held = side["prompt_bytes"]["total"] - side["prompt_bytes"]["slack"]
            cells = [prompt, str(row["batch_size"]), name, f"{side['entries']:,}", f"{held / 2**10:,.1f}"]
            cells += [f"{side['peak_bytes'] / 2**20:,.1f}"]
            cells += [f"{middle_ms(side[f'{part}_seconds']):,.1f}" for part in ("prefill", "step")]
            found = [row["ratios"][part].get(name) for part in ("prefill", "step")]
            cells += ["" if ratio is None else cell(tuple(ratio)) for ratio in found]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print(table(json.loads(Path(path).read_text())))
