"""Bits and groups: which (r, S, K, bits) scores best at one byte budget, as a picture and tables.

    subtoken-train evaluate --config recipes/eval/bits_scenes.yaml --limit 30
    subtoken-train evaluate --config recipes/eval/bits_recall.yaml
    python benchmarks/bits_pareto.py results/bits_scenes results/bits_recall    # the CSV, then as below
    python benchmarks/bits_pareto.py                    # from the committed CSV: the picture and the page's tables

Shares are of the compressed region's keys and values in 16 bits, scales and index counted, measured on what was stored.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.mini_suite import read_scores
from benchmarks.pages import put, svg_file
from subtoken_train.evaluation.charts import COLORS, INK, MARKERS, axes_in_a_row, styled
from subtoken_train.evaluation.reporting.exports import report_csv
from subtoken_train.evaluation.reporting.report import make_report

ROOT = Path(__file__).resolve().parents[1]
CSV_FILE, SVG_FILE = (ROOT / "benchmarks/results/screens" / f"bits.{suffix}" for suffix in ("csv", "svg"))
PAGE = ROOT / "benchmarks/results/screens/bits.md"
BITS = {
    "-": "16 bits",
    "int8": "8 bits",
    "int4": "4 bits",
    "int4_rotated": "4 bits, keys rotated",
    "kivi4": "4 bits, KIVI",
    "kivi2": "2 bits, KIVI",
}
"""Words of the formats, by what a record calls them."""
BUDGETS = {
    "scenes_caption": (0.3125, 0.15625, 0.078125, 0.0390625),
    "recall": (0.4375, 0.21875, 0.109375, 0.0546875),
}
INDEX = 1.035
"""How far an arm of a budget may be over it: the index that finds its groups is beside the promised share."""
TITLES = {"scenes_caption": "descriptions of scenes", "recall": "recall"}


@dataclass(frozen=True)
class Choice:
    """One arm: what it keeps, what that takes, and how it scores.

    Attributes:
        task: what was asked.
        adapter: folder's name.
        keep: share of the tokens that stay, in words.
        groups: ``S16K4 linear``; ``-`` for whole tokens.
        bits: of a stored number, in words.
        kv: share of the 16-bit bytes, scales and index counted.
        value: the score.
        low: of its 95 % interval over samples.
        high: likewise.
    """

    task: str
    adapter: str
    keep: str
    groups: str
    bits: str
    kv: float
    value: float
    low: float
    high: float


def read_choices() -> list[Choice]:
    """The committed CSV's arms, the dearest first."""
    frame = read_scores(CSV_FILE)
    rows = frame[frame.score == "score"].to_dict("records")
    return sorted((_choice(row) for row in rows), key=lambda one: (one.task, -one.kv, one.adapter))


def _choice(row: dict[str, str]) -> Choice:
    reducer, eviction = row["reducer"].split(), row["eviction"]
    keep = f"{100 * float(reducer[1]):g} %" if len(reducer) > 1 else "100 %"
    numbers = (float(row[key]) for key in ("kv_with_index", "value", "low", "high"))
    return Choice(
        row["task"],
        Path(row["adapter"]).name,
        keep,
        row["groups"],
        BITS[eviction],
        *numbers,
    )


def front(choices: Sequence[Choice]) -> list[Choice]:
    """Those that no other arm beats at its bytes or fewer, ascending in bytes."""
    best: list[Choice] = []
    for one in sorted(choices, key=lambda one: (one.kv, -one.value)):
        if not best or one.value > best[-1].value:
            best.append(one)
    return best


def table() -> str:
    """Every arm, and the best of each kind within each budget."""
    found = read_choices()
    parts = []
    for task, budgets in BUDGETS.items():
        own = [one for one in found if one.task == task]
        held = front(own)
        lines = [f"| {task} | tokens | groups | bits | KV | score | |", "|---|---|---|---|---|---|---|"]
        lines += [
            f"| {one.adapter} | {one.keep} | {one.groups} | {one.bits} | {one.kv:.2%} | {_score(one)} | "
            f"{'front' if one in held else ''} |"
            for one in own
        ]
        heads = [f"{kind}, {bits}" for kind in ("whole tokens", "groups") for bits in ("16 bits", "any bits")]
        lines += [
            "",
            f"| {task}, bytes at most, and {100 * (INDEX - 1):.1f} % of them for an index | {' | '.join(heads)} |",
            "|---" * (len(heads) + 1) + "|",
        ]
        lines += [f"| {budget:.4%} | {' | '.join(_bests(own, budget))} |" for budget in budgets]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _score(one: Choice) -> str:
    return f"{100 * one.value:.1f} [{100 * one.low:.1f}, {100 * one.high:.1f}]"


def _bests(choices: Sequence[Choice], budget: float) -> list[str]:
    cells = []
    for grouped in (False, True):
        for bits in ((BITS["-"],), tuple(BITS.values())):
            fitting = [
                one
                for one in choices
                if (one.groups != "-") == grouped and one.bits in bits and one.kv <= budget * INDEX
            ]
            best = max(fitting, key=lambda one: one.value, default=None)
            words = best and f"{_score(best)} ({best.adapter}, r {best.keep}, {best.bits})"
            cells.append(words or "-")
    return cells


@styled
def figure() -> Figure:
    """A chart per task: score over bytes; a colour per adapter, a marker per number of bits, the front as a line."""
    found = read_choices()
    drawn, many = axes_in_a_row(len(BUDGETS))
    for axes, task in zip(many, BUDGETS, strict=True):
        own = [one for one in found if one.task == task]
        _draw(axes, own, TITLES[task])
    return drawn


def _draw(axes: Axes, choices: Sequence[Choice], title: str) -> None:
    adapters = list(dict.fromkeys(one.adapter for one in sorted(choices, key=lambda one: one.adapter)))
    for adapter, color in zip(adapters, COLORS, strict=False):
        for bits, marker in zip(BITS.values(), MARKERS, strict=False):
            line = sorted(
                (one for one in choices if (one.adapter, one.bits) == (adapter, bits)), key=lambda one: one.kv
            )
            places = [(100 * one.kv, 100 * one.value) for one in line]
            axes.plot(*zip(*places, strict=True), color=color, marker=marker, linewidth=1, alpha=0.9)
    held = front(choices)
    axes.step([100 * one.kv for one in held], [100 * one.value for one in held], where="post", color=INK, linestyle=":")
    low, high = (edge(np.log2([one.kv for one in choices])) for edge in (np.min, np.max))
    ticks = 100 * 2.0 ** np.arange(np.floor(low), np.ceil(high) + 1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:.3g}%" for tick in ticks])
    axes.set(title=title, xlabel="bytes, of 16-bit keys and values; scales and index counted", ylabel="score, %")
    handles = [Line2D([], [], color=color, label=name) for name, color in zip(adapters, COLORS, strict=False)]
    handles += [
        Line2D([], [], color=INK, marker=marker, linestyle="", label=bits)
        for bits, marker in zip(BITS.values(), MARKERS, strict=False)
    ]
    axes.legend(handles=[*handles, Line2D([], [], color=INK, linestyle=":", label="front")])


def drawing() -> str:
    """The picture as an SVG file of its own."""
    words = "Score over stored bytes for tokens, value groups and bits; the tables beside it have the numbers"
    return svg_file(figure(), "bits", "Bits and groups at equal bytes", words)


def main() -> None:
    """Write what is named above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, help="results folders of the two grids")
    args = parser.parse_args()
    if args.results:
        CSV_FILE.write_text(report_csv(make_report(args.results)), encoding="utf-8")
    SVG_FILE.write_text(drawing(), encoding="utf-8")
    put(PAGE, "bits", table())


if __name__ == "__main__":
    main()
