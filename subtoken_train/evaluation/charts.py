"""Draw small charts in one style: bars, lines, a heat map. Uses matplotlib without its global state.

An SVG has no ground of its own and draws its ink in the reader's text colour; the colours of series read on white and
on dark pages alike, and apart from each other without red or green cones. A PNG is on white.
"""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from subtoken_train.errors import plain

INK = "#1d2127"
COLORS = ("#189cd8", "#c0249c", "#0ca83c", "#783cfc", "#846c54", "#fc1818", "#6084fc", "#cc789c")
MARKERS = "osD^vP"
"""Shape of points, for the first series of a colour, the second, and so on."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "subtoken_train", "text.parse_math": False, "font.size": 9.5,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "font.sans-serif": ["DejaVu Sans"], "grid.color": INK, "grid.alpha": 0.15, "axes.grid": True,
    "axes.axisbelow": True, "axes.facecolor": "none", "axes.titlesize": "medium", "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
styled = rc_context(STYLE)
"""Decorator of what makes or writes figures."""


@styled
def axes_in_a_row(count: int, inches: tuple[float, float] = (7.2, 4.8)) -> tuple[Figure, list[Axes]]:
    """Make a figure with axes side by side, each of so many inches (wide, high)."""
    figure = Figure(figsize=(inches[0] * count, inches[1]), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def _over_steps(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


@styled
def draw_bars(axes: Axes, heights: Sequence[float], title: str, x_label: str, y_label: str) -> None:
    """Draw a bar for each of 0, 1, 2, ..."""
    axes.bar(range(len(heights)), heights, color=COLORS[0])
    _over_steps(axes, title, x_label, y_label)
    axes.grid(visible=False, axis="x")


@styled
def draw_lines(
    axes: Axes,
    lines: Mapping[str, Sequence[float] | Mapping[int, float]],
    title: str,
    x_label: str,
    y_label: str,
    first: int = 0,
) -> None:
    """Draw named values by step, or over ``first``, ``first`` + 1, ...; not all have the same steps. It begins at 0."""
    for place, (name, values) in enumerate(lines.items()):
        course = values if isinstance(values, Mapping) else dict(enumerate(values, first))
        color, marker = COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)] if len(course) < 40 else ""
        axes.plot(list(course), list(course.values()), color=color, marker=marker, label=name)
    _over_steps(axes, title, x_label, y_label)
    axes.set_ylim(0, None)
    axes.legend()


@styled
def draw_cells(
    axes: Axes,
    rows: Sequence[Sequence[float]],
    title: str,
    x_label: str,
    y_label: str,
    first: int = 0,
    ends: tuple[float, float] | None = None,
) -> None:
    """Draw a cell per value, row ``first`` at the top, scale from 0; ``ends``: where first and last column end."""
    left, right = ends or (-0.5, len(rows[0]) - 0.5)
    extent = (left, right, first + len(rows) - 0.5, first - 0.5)
    picture = axes.imshow(rows, cmap="Blues", vmin=0, aspect="auto", extent=extent, interpolation="nearest")
    _over_steps(axes, title, x_label, y_label)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False)
    axes.figure.colorbar(picture, ax=axes)


@styled
def image_of(figure: Figure) -> Image.Image:
    """Draw the figure on white, 100 pixels an inch."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    with Image.open(buffer) as image:
        return image.convert("RGB")


@styled
def svg_of(figure: Figure, name: str, title: str, description: str) -> Markup:
    """Draw the figure as an element of a page; its ids begin with ``name``; readers hear title and description."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the reader's fonts have what matplotlib's own lacks
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    _, _, body = buffer.getvalue().partition("<svg")[2].partition(">")
    body = re.sub(r"\s*<defs>\s*<style.*?</defs>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(rf"(?<=: ){INK}(?=[;\"])", "currentColor", body)
    width, height = (f"{72 * inches:g}" for inches in figure.get_size_inches())
    words = Markup('<title id="{0}-title">{1}</title>\n<desc id="{0}-text">{2}</desc>')
    words = words.format(name, plain(title), plain(description))
    head = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 {1} {2}" '
        'role="img" aria-labelledby="{0}-title {0}-text">\n'
    ).format(name, width, height)
    return head + words + Markup(body.rstrip())
