"""Charts: the pixels stand where the numbers say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.charts import (
    BOTTOM,
    COLORS,
    LEFT,
    RIGHT,
    SIZE,
    TOP,
    bar_chart,
    heat_map,
    line_chart,
    side_by_side,
    ticks,
)


def inside(image, color):
    """Where a colour is inside the plot's box, as (rows from the bottom, columns from the left)."""
    rows, columns = np.nonzero((np.array(image) == color).all(-1))
    keep = (rows > TOP) & (rows < BOTTOM) & (columns > LEFT) & (columns < RIGHT)
    return BOTTOM - rows[keep], columns[keep] - LEFT


def test_bars_are_as_high_as_their_numbers():
    image = bar_chart([0.0, 0.25, 0.5, 0.1], "t", "x", "y")
    assert image.size == SIZE
    height, column = inside(image, COLORS[0])
    slot, axis = (RIGHT - LEFT) / 4, BOTTOM - TOP
    highest = [height[(column > i * slot) & (column < (i + 1) * slot)].max(initial=0) for i in range(4)]
    assert highest == pytest.approx([0, axis / 2, axis, axis / 5], abs=2)  # the axis ends at 0.5


def test_lines_go_through_their_points():
    image = line_chart({"a": [0, 4, 2], "b": [1, 1, 1]}, "t", "x", "y")
    slot, axis = (RIGHT - LEFT) / 3, BOTTOM - TOP
    for color, values in ((COLORS[0], (0, 4, 2)), (COLORS[1], (1, 1, 1))):
        found = set(zip(*inside(image, color), strict=True))
        for i, value in enumerate(values):
            x, y = (i + 0.5) * slot, axis * value / 4
            assert any(abs(row - y) < 5 and abs(column - x) < 5 for row, column in found)


def test_cells_are_as_dark_as_their_numbers():
    image = heat_map([[0.0, 1.0], [0.5, 0.25]], "t", "x", "y")
    for i, row in enumerate([[0.0, 1.0], [0.5, 0.25]]):
        for j, depth in enumerate(row):
            x = LEFT + (j + 0.5) * (RIGHT - LEFT) / 2
            y = TOP + (i + 0.5) * (BOTTOM - TOP) / 2
            expected = tuple(round(255 + (part - 255) * depth) for part in COLORS[0])
            assert image.getpixel((int(x), int(y))) == expected


def test_pictures_stand_in_a_row():
    row = side_by_side([bar_chart([1.0], "a", "x", "y"), heat_map([[0.0]], "b", "x", "y")])
    assert row.size == (2 * SIZE[0], SIZE[1])
    assert row.getpixel((SIZE[0] // 2, BOTTOM - 20)) == COLORS[0]


@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_reach_the_largest(largest):
    values = ticks(largest)
    assert values[0] == 0
    assert 2 <= len(values) <= 8
    assert values[-1] >= largest * (1 - 1e-6)
    assert values[-2] < largest
    step = float(f"{values[1]:.6g}")
    assert f"{step:e}"[0] in "125"


def test_ticks_of_nothing():
    assert ticks(0) == [0, 1]
    assert ticks(1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert ticks(5.4) == [0, 1, 2, 3, 4, 5, 6]


def test_many_values_still_fit():
    for image in (bar_chart([1.0] * 300, "t", "x", "y"), line_chart({"a": [1.0] * 577}, "t", "x", "y", first=3)):
        assert image.size == SIZE
    assert heat_map([[1.0] * 64] * 80, "t", "x", "y", first=2).size == SIZE
