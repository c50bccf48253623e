"""Which compression loses least of a real text at each size of the cache: a table and a picture of records.

    python -m benchmarks.real_frontier        # docs/choosing.md's table, and results/real_text/frontier.svg

Records are ``real_text.py``'s, of arms that compress a context before it is asked. The size is what was measured, as a
share of the full cache in bfloat16. A winner among many is somewhat flattered; intervals are of one arm against the
full cache.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.comparison_tables import signed_cell
from benchmarks.pages import put, svg_file
from benchmarks.real_text import NAMES, OUT, facts_lost, read, text_lost
from subtoken_train.evaluation.charts import COLORS, MARKERS, axes_in_a_row, styled

ROOT = Path(__file__).resolve().parents[1]
PAGE, SVG_FILE = ROOT / "docs/choosing.md", OUT / "frontier.svg"
SIZES = (0.53, 0.27, 0.225, 0.155, 0.13, 0.11)
"""Shares of the bytes; an arm is in a row where it takes no more than that, and more than two thirds of it."""
KINDS = {
    "KVzip, whole values in bf16": r"kvzip [0-9.]+%",
    "KVzip, int8": r"kvzip [0-9.]+% in int8",
    "KVzip, int4": r"kvzip [0-9.]+% in int4",
    "KVzip, 12 of 16 value groups": r"kvzip [0-9.]+%, 12 of 16 value groups by norm",
    "KVzip, 12 of 16 value groups, int8 or int4": r"kvzip [0-9.]+% in int[48], 12 of 16 value groups by norm",
    "other evictions": r"(?!kvzip [0-9]).* [0-9.]+%",
}
"""Series of the picture, and the arms of each."""

Records = Mapping[str, Mapping[str, Any]]


def blind(model: str) -> dict[str, dict[str, Any]]:
    """Return a model's records but those that saw the question."""
    return {own["arm"]: own for own in read(OUT / f"{model}.jsonl") if "question seen" not in own["arm"]}


def _size(own: Mapping[str, Any]) -> float:
    return float(np.mean(own["share"]))


def table(models: Mapping[str, Records]) -> str:
    """Write for each size and model the arms that lose least of facts and of text."""
    lines = [
        "| bytes, at most | model | for facts | nats a fact | for text | nats a token |",
        "|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        for name, records in models.items():
            full = records["full cache"]
            fit = {arm: own for arm, own in records.items() if 2 / 3 * size < _size(own) <= size}
            if not fit:
                continue
            cells = []
            for lost, digits in ((facts_lost, 2), (text_lost, 3)):
                least = min(fit, key=lambda arm, lost=lost: float(lost(fit[arm], full).mean()))
                cells += [f"{least} ({_size(fit[least]):.1%})", signed_cell(lost(fit[least], full), digits)]
            lines.append(f"| {size:.1%} | {NAMES[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


@styled
def figure(models: Mapping[str, Records]) -> Figure:
    """Draw nats lost a fact over the bytes, models side by side."""
    made, axes = axes_in_a_row(len(models), (5.2, 4.4))
    for own_axes, (name, records) in zip(axes, models.items(), strict=True):
        for number, (kind, pattern) in enumerate(KINDS.items()):
            points = sorted(
                (_size(own), float(facts_lost(own, records["full cache"]).mean()))
                for arm, own in records.items()
                if re.fullmatch(pattern, arm)
            )
            line = "none" if kind == "other evictions" else "-"
            if points:
                places = zip(*points, strict=True)
                own_axes.plot(*places, color=COLORS[number], marker=MARKERS[number], linestyle=line, label=kind)
        own_axes.set(title=NAMES[name], xlabel="bytes, share of the full cache in bf16", ylabel="nats lost a fact")
        own_axes.set(xscale="log", xlim=(0.09, 0.62), yscale="symlog", ylim=(-0.2, 14))
        own_axes.set_yticks([0, 0.5, 1, 3, 10], ["0", "0.5", "1", "3", "10"])
        own_axes.set_xticks([0.1, 0.125, 0.15, 0.22, 0.27, 0.5], ["10 %", "12.5", "15", "22", "27", "50"], minor=False)
        own_axes.minorticks_off()
    axes[-1].legend(fontsize="small")
    return made


def picture(models: Mapping[str, Records]) -> str:
    """Return the picture as SVG."""
    words = (
        "Nats that a fact loses over the bytes of the cache, for KVzip in several precisions and for other evictions"
    )
    return svg_file(figure(models), "frontier", "Loss against bytes on real text", words)


def main() -> None:
    """Write the table and the picture."""
    models = {name: blind(name) for name in NAMES}
    put(PAGE, "frontier", table(models))
    SVG_FILE.write_text(picture(models), encoding="utf-8")


if __name__ == "__main__":
    main()
