"""Small charts, drawn with Pillow, which the package has anyway: bars, lines, a heat map; no negative values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont

SIZE = (720, 480)
LEFT, TOP, RIGHT, BOTTOM = 90, 60, 690, 400
"""The plot's box inside the picture, in pixels."""
INK, GRID, PAPER = (40, 40, 40), (225, 225, 225), (255, 255, 255)
COLORS = ((31, 95, 168), (214, 96, 32), (60, 140, 70), (140, 80, 160))
MAX_LABELS = 17


def bar_chart(heights: Sequence[float], title: str, x_label: str, y_label: str) -> Image.Image:
    """A bar for each of 0, 1, 2, ..."""
    image, draw, top = _frame(max(heights), title, x_label, y_label)
    slot = (RIGHT - LEFT) / len(heights)
    for place, height in enumerate(heights):
        middle = LEFT + (place + 0.5) * slot
        bar = (middle - 0.35 * slot, _y(height, top), middle + 0.35 * slot, BOTTOM)
        draw.rectangle(bar, fill=COLORS[0])
    _x_labels(draw, len(heights), slot)
    return image


def line_chart(
    lines: Mapping[str, Sequence[float]], title: str, x_label: str, y_label: str, first: int = 0
) -> Image.Image:
    """Named lines over ``first``, ``first`` + 1, ...; all of one length."""
    image, draw, top = _frame(max(max(values) for values in lines.values()), title, x_label, y_label)
    count = len(next(iter(lines.values())))
    slot = (RIGHT - LEFT) / count
    for place, (name, values) in enumerate(lines.items()):
        color = COLORS[place % len(COLORS)]
        points = [(LEFT + (i + 0.5) * slot, _y(value, top)) for i, value in enumerate(values)]
        draw.line(points, fill=color, width=3)
        for x, y in points if count <= 2 * MAX_LABELS else ():
            draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=color)
        draw.text((RIGHT - 8, TOP + 8 + 20 * place), name, fill=color, font=_font(15), anchor="rt")
    _x_labels(draw, count, slot, first)
    return image


def heat_map(rows: Sequence[Sequence[float]], title: str, x_label: str, y_label: str, first: int = 0) -> Image.Image:
    """A cell per value, row ``first`` at the top; white is 0, the darkest cell the largest value (see title)."""
    largest = max(max(row) for row in rows)
    image, draw = _page(f"{title} (darkest: {largest:.3g})", x_label, y_label)
    width, height = (RIGHT - LEFT) / len(rows[0]), (BOTTOM - TOP) / len(rows)
    for i, row in enumerate(rows):
        y = TOP + i * height
        for j, value in enumerate(row):
            x, depth = LEFT + j * width, value / largest if largest else 0.0
            shade = tuple(round(255 + (part - 255) * depth) for part in COLORS[0])
            draw.rectangle((x, y, x + width, y + height), fill=shade)
        if i % math.ceil(len(rows) / MAX_LABELS) == 0:
            draw.text((LEFT - 8, y + height / 2), str(first + i), INK, _font(15), "rm")
    draw.rectangle((LEFT, TOP, RIGHT, BOTTOM), outline=INK)
    _x_labels(draw, len(rows[0]), width)
    return image


def side_by_side(images: Sequence[Image.Image]) -> Image.Image:
    """The pictures in a row."""
    row = Image.new("RGB", (sum(image.width for image in images), max(image.height for image in images)), PAPER)
    x = 0
    for image in images:
        row.paste(image, (x, 0))
        x += image.width
    return row


def ticks(largest: float) -> list[float]:
    """From 0 to the first round number at or above ``largest``, in at most six steps of 1, 2 or 5 times 10^n."""
    if largest <= 0:
        return [0.0, 1.0]
    rough = largest / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(largest / step * (1 - 1e-9)) + 1)]


def _frame(largest: float, title: str, x_label: str, y_label: str) -> tuple[Image.Image, ImageDraw.ImageDraw, float]:
    """A page with a scaled y axis; the axis' upper end is the third item."""
    image, draw = _page(title, x_label, y_label)
    values = ticks(largest)
    for value in values:
        y = _y(value, values[-1])
        draw.line((LEFT, y, RIGHT, y), fill=GRID)
        draw.text((LEFT - 8, y), f"{value:g}" if value < 1e4 else f"{value:,.0f}", INK, _font(15), "rm")
    draw.line((LEFT, TOP, LEFT, BOTTOM, RIGHT, BOTTOM), fill=INK, width=2)
    return image, draw, values[-1]


def _page(title: str, x_label: str, y_label: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", SIZE, PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((SIZE[0] / 2, 28), title, INK, _font(18), "mm")
    draw.text(((LEFT + RIGHT) / 2, SIZE[1] - 28), x_label, INK, _font(16), "mm")
    words = Image.new("RGB", (BOTTOM - TOP, 24), PAPER)
    ImageDraw.Draw(words).text((words.width / 2, 12), y_label, INK, _font(16), "mm")
    image.paste(words.rotate(90, expand=True), (4, TOP))
    return image, draw


def _x_labels(draw: ImageDraw.ImageDraw, count: int, slot: float, first: int = 0) -> None:
    for place in range(0, count, math.ceil(count / MAX_LABELS)):
        draw.text((LEFT + (place + 0.5) * slot, BOTTOM + 16), str(first + place), INK, _font(15), "mm")


def _y(value: float, top: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * value / top


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
