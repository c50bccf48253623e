"""A drawing for an HTML page: shapes and text as SVG elements, escaped, in the page's own colours.

Colours come from the page's style sheet by class (``ink``, ``grid``, ``c0`` ... ``c7``), so that a drawing follows the
reader's light or dark setting. Coordinates are in the units of the view box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

COLORS = 8
"""How many series have a colour of their own; after them colours come again, with other markers."""

Point = tuple[float, float]


class Drawing:
    """One picture.

    Args:
        width: of the view box.
        height: likewise.
        title: what it shows, in a few words: what a screen reader says first.
        description: what can be read from it.
    """

    def __init__(self, width: float, height: float, title: str, description: str) -> None:
        self.width, self.height = width, height
        self.title, self.description = title, description
        self._parts: list[Markup] = []

    def line(self, points: Sequence[Point], style: str) -> None:
        """A line through the points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(Markup('<polyline class="{}" points="{}"/>').format(style, path))

    def bar(self, left: float, top: float, right: float, bottom: float, style: str, words: str) -> None:
        """A filled box; ``words`` show when a pointer rests on it."""
        shape = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}" rx="2">{}</rect>')
        numbers = [f"{number:.1f}" for number in (left, top, max(0.5, right - left), bottom - top)]
        self._parts.append(shape.format(style, *numbers, _tip(words)))

    def marker(self, point: Point, place: int, words: str) -> None:
        """A point of series ``place``; ``words`` show when a pointer rests on it."""
        sides = (0, 4, 3)[place // COLORS % 3 if place >= COLORS else place % 3]
        x, y = point
        style = series_style(place)
        if not sides:
            shape = Markup('<circle class="dot {}" cx="{}" cy="{}" r="5">{}</circle>')
            self._parts.append(shape.format(style, f"{x:.1f}", f"{y:.1f}", _tip(words)))
            return
        turn = math.pi / 4 if sides == 4 else -math.pi / 2
        angles = [turn + 2 * math.pi * side / sides for side in range(sides)]
        corners = " ".join(f"{x + 6.5 * math.cos(angle):.1f},{y + 6.5 * math.sin(angle):.1f}" for angle in angles)
        shape = Markup('<polygon class="dot {}" points="{}">{}</polygon>')
        self._parts.append(shape.format(style, corners, _tip(words)))

    def text(
        self, point: Point, words: str, style: str = "label", anchor: str = "middle", turned: bool = False
    ) -> None:
        """A line of text, centred at or starting or ending at a point."""
        x, y = (f"{number:.1f}" for number in point)
        turn = Markup(' transform="rotate(-90 {} {})"').format(x, y) if turned else Markup("")
        shape = Markup('<text class="{}" x="{}" y="{}" text-anchor="{}"{}>{}</text>')
        self._parts.append(shape.format(style, x, y, anchor, turn, words))

    def markup(self, name: str) -> Markup:
        """The picture as an element.

        Args:
            name: unique in the page; the labels' ids are made of it.
        """
        head = Markup(
            '<svg viewBox="0 0 {} {}" role="img" aria-labelledby="{}-title {}-text">'
            '<title id="{}-title">{}</title><desc id="{}-text">{}</desc>'
        ).format(f"{self.width:g}", f"{self.height:g}", name, name, name, self.title, name, self.description)
        return head + Markup("").join(self._parts) + Markup("</svg>")


def series_style(place: int) -> str:
    """The class of a series' colour."""
    return f"c{place % COLORS}"


def ticks_between(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``, in steps of 1, 2 or 5 times a power of ten."""
    rough = max(high - low, 1e-9) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def _tip(words: str) -> Markup:
    return Markup("<title>{}</title>").format(words)
