"""The picture of ``docs/methods.md``: what visual pruners leave of digit scenes, from the committed report.

python -m benchmarks.pruners_scenes      # results/pruners_scenes.svg from results/pruners_scenes.csv
"""

import csv
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.pages import svg_file
from subtoken_train.evaluation.charts import COLORS, axes_in_a_row, styled

CSV_FILE, SVG_FILE = (Path(__file__).parent / f"results/pruners_scenes.{suffix}" for suffix in ("csv", "svg"))
WHOLE = "-"


def means() -> dict[tuple[str, float], float]:
    """Mean score over tasks in %, by reducer and share of the tokens."""
    found: dict[tuple[str, float], list[float]] = {}
    with CSV_FILE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            name, _, share = row["reducer"].partition(" ")
            found.setdefault((name, float(share or 1)), []).append(100 * float(row["value"]))
    return {key: sum(scores) / len(scores) for key, scores in found.items()}


@styled
def figure() -> Figure:
    """Bars of each reducer at each share, the best first; a line at what no reduction scores."""
    found = means()
    shares = sorted({share for name, share in found if name != WHOLE}, reverse=True)
    names = sorted({name for name, _ in found if name != WHOLE}, key=lambda name: -found[name, shares[0]])
    picture, (axes,) = axes_in_a_row(1)
    for number, share in enumerate(shares):
        places = [place + 0.4 * number for place in range(len(names))]
        axes.bar(places, [found[name, share] for name in names], 0.38, color=COLORS[number], label=f"{share:.1%} kept")
    axes.axhline(found[WHOLE, 1.0], color=COLORS[4], linestyle="--", label="every token")
    axes.set_xticks([place + 0.2 for place in range(len(names))], names, rotation=30, ha="right")
    axes.set(ylabel="mean score, %", ylim=(0, 100))
    axes.grid(visible=False, axis="x")
    axes.legend(frameon=False)
    return picture


def drawing() -> str:
    """The picture as an SVG file of its own."""
    words = "Mean scores of visual pruners at two shares of the tokens; docs/methods.md has the numbers"
    return svg_file(figure(), "pruners", "Visual pruners on digit scenes", words)


if __name__ == "__main__":
    SVG_FILE.write_text(drawing(), encoding="utf-8")
