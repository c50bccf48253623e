"""Accuracy of every eviction method on the embedded VLM at 50, 20, 10 and 5 % of the visual KV, routed and unrouted.

    subtoken-train data scenes
    python -m benchmarks.eviction_accuracy              # records in benchmarks/results/eviction
    python -m benchmarks.eviction_accuracy --table      # put the table of the records into docs/quality.md

Both adapters were trained with every visual token; nothing was trained for eviction. *Unrouted* keeps 64 * f visual
tokens per layer on average, *routed* (S16K4, 62.5 % of a token's bytes) 64 * f / 0.625 of them, rounded down, and one
fewer where heads that keep more tokens hold more of their groups: at most equal bytes. Text always stays. The fraction
that was really kept is measured on the plan and printed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import put
from benchmarks.run_records import add_run, read_runs
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS
from subtoken_train.evaluation.intervals import bootstrap_interval

ROOT = Path(__file__).resolve().parents[1]
ADAPTERS = {"unrouted": ("tiny_lora_only", 1.0), "routed": ("tiny_none100_s16k4", 0.625)}
"""Base -> (adapter folder, share of a token's bytes that it keeps)."""
FRACTIONS = (0.5, 0.2, 0.1, 0.05)
VISUAL_TOKENS = 64
SETTINGS: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 8},
    "pyramidkv": {"window": 8},
    "sparsemm": {"calibration": "checkpoints/calibrations/tiny-llava_sparsemm.json"},
}
"""Where a published default is longer than this model's prompts (64 visual tokens and a line of text), and where a file
is read: ``subtoken-train calibrate sparsemm --backbone checkpoints/tiny-llava`` wrote it."""
NONE = "none"


def run_method(method: str, data: Path, limit: int, out: Path) -> None:
    """Answer with one method at every fraction, routed and unrouted; adds a run for each to the records in ``out``."""
    from subtoken_train.artifact.folder import read_adapter
    from subtoken_train.datasets.records import InstructionRecords
    from subtoken_train.evaluation.runner.data_file import answer_records
    from subtoken_train.evictions import build_eviction
    from subtoken_train.inference.compression import Compression

    records, there = InstructionRecords(data), {run["arm"] for run in read_runs(out)}
    for base, (name, share) in ADAPTERS.items():
        _, backbone, _ = read_adapter(ROOT / "checkpoints/adapters" / name)
        for fraction in FRACTIONS if method != NONE else (share,):
            if (arm := f"{method} {base} {fraction:g}") in there:
                continue
            compression, tokens = None, int(VISUAL_TOKENS * fraction / share + 1e-9)
            if method != NONE:
                eviction = build_eviction(method, **SETTINGS.get(method, {}))
                compression = Compression(eviction, tokens, "tokens", "visual")
            answers = answer_records(backbone, records, batch_size=128, limit=limit, compression=compression)
            while compression is not None and answers.realised > fraction + 1e-9:
                # heads that keep more tokens may hold more of their groups: a token less, so that no bytes are over
                compression = replace(compression, keep=compression.keep - 1)
                answers = answer_records(backbone, records, batch_size=128, limit=limit, compression=compression)
            record = {
                "arm": arm,
                "seed": 0,
                "method": method,
                "base": base,
                "fraction": fraction,
                "settings": json.dumps(SETTINGS.get(method, {})),
                "measured": round(answers.realised, 5),
                "seconds": round(answers.seconds, 1),
                "kinds": [record.kind for record in answers.records],
                "scores": [round(score, 3) for score in answers.scores],
            }
            add_run(out, record)
            print(arm, f"{np.mean(record['scores']):.3f}", flush=True)


def table(folder: Path) -> str:
    """Markdown: questions / descriptions in %, with the 95 % interval of the questions and the measured fraction.

    Below it stands which registered methods have no record.
    """
    from subtoken_train.evictions import EVICTIONS

    lines = ["| method | base | " + " | ".join(f"{100 * f:g} %" for f in FRACTIONS) + " |"]
    lines.append("|---|---|" + "---|" * len(FRACTIONS))
    runs = read_runs(folder)
    measured = {run["method"] for run in runs}
    for method in sorted(measured, key=lambda method: (method != NONE, method)):
        for base in ADAPTERS:
            own = [run for run in runs if (run["method"], run["base"]) == (method, base)]
            rows = sorted(own, key=lambda run: -run["fraction"])
            cells = [_cell(row) for row in rows]
            if method == NONE:
                cells = [f"{100 * rows[0]['fraction']:g} %: {cells[0]}"] + [""] * (len(FRACTIONS) - 1)
            lines.append(f"| {method} | {base} | " + " | ".join(cells) + " |")
    missing = ", ".join(f"`{name}`" for name in sorted(set(EVICTIONS) - measured))
    return "\n".join([*lines, "", f"Not measured here so far: {missing or 'none'}."])


def _cell(row: dict[str, Any]) -> str:
    scores, described = np.array(row["scores"]), np.isin(row["kinds"], DESCRIPTION_KINDS)
    low, high = bootstrap_interval(scores[~described])
    questions, descriptions = scores[~described].mean(), scores[described].mean()
    kept = f"({100 * row['measured']:.1f})"
    return f"{100 * questions:.1f} [{100 * low:.1f}, {100 * high:.1f}] / {100 * descriptions:.1f} {kept}"


def main() -> None:
    """Run every method, or put the table into its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", help="only these (default: all that are registered, and none)")
    parser.add_argument("--data", type=Path, default=ROOT / "data/scenes/test.json")
    parser.add_argument("--limit", type=int, default=1200, help="questions")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/eviction")
    parser.add_argument(
        "--table", action="store_true", help="put the table of the records into docs/quality.md, and stop"
    )
    args = parser.parse_args()
    if args.table:
        put(ROOT / "docs/quality.md", "eviction", table(args.out))
        return
    from subtoken_train.evictions import EVICTIONS

    for method in args.methods or [NONE, *EVICTIONS]:
        run_method(method, args.data, args.limit, args.out)


if __name__ == "__main__":
    main()
