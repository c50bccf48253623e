"""Charts: what is drawn is what the numbers say, and its colours can be read by everybody."""

import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.figure import Figure

from subtoken_train.evaluation.charts import (
    COLORS,
    axes_in_a_row,
    draw_bars,
    draw_cells,
    draw_lines,
    image_of,
    styled,
    svg_of,
)
from tests.support.commands import refused
from tests.support.drawings import clipped_texts
from tests.support.sampling import sampled

PAGES = {"white": "#ffffff", "the page, dark": "#1b1f25", "dark": "#0d1117"}
# Machado et al., severity 1: linear sRGB to linear sRGB
BLINDNESS = {
    "none": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
}
TO_XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]


def linear(color: str) -> np.ndarray:
    """``#rrggbb`` -> linear sRGB in 0..1."""
    parts = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    x, y, z = np.cbrt(np.array(TO_XYZ) @ np.clip(rgb, 0, 1) / (0.95047, 1, 1.08883))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_colors_stand_out_from_light_and_dark_pages(page):
    """By the 3 : 1 that WCAG 2.1 asks of graphics."""
    for color in COLORS:
        light, dark = sorted((np.array(TO_XYZ[1]) @ linear(part) + 0.05 for part in (color, page)), reverse=True)
        assert light / dark >= 3, color


@pytest.mark.parametrize("matrix", BLINDNESS.values(), ids=BLINDNESS)
def test_colors_are_told_apart(matrix):
    """Further apart (CIE 1976) than the palette of Okabe and Ito is for a deuteranope, which is 17."""
    seen = {color: lab(np.array(matrix) @ linear(color)) for color in COLORS}
    assert len(seen) == len(COLORS)
    assert min(np.linalg.norm(seen[a] - seen[b]) for a, b in combinations(COLORS, 2)) > 20


def test_what_is_drawn_is_what_the_numbers_say():
    _, (bars, lines) = axes_in_a_row(2)
    draw_bars(bars, [0.0, 0.25, 0.5, 0.1], "t", "x", "y")
    assert [bar.get_height() for bar in bars.patches] == [0.0, 0.25, 0.5, 0.1]
    assert [bar.get_center()[0] for bar in bars.patches] == pytest.approx([0, 1, 2, 3])
    assert (bars.get_title(), bars.get_xlabel(), bars.get_ylabel()) == ("t", "x", "y")
    draw_lines(lines, {"a": [0, 4, 2], "b": [1, 1, 1]}, "t", "x", "y", first=3)
    assert [line.get_xydata().tolist() for line in lines.lines] == [[[3, 0], [4, 4], [5, 2]], [[3, 1], [4, 1], [5, 1]]]
    assert [text.get_text() for text in lines.get_legend().get_texts()] == ["a", "b"]
    assert len({line.get_color() for line in lines.lines}) == 2
    assert lines.get_ylim()[0] == 0
    figure, (axes,) = axes_in_a_row(1)
    draw_cells(axes, [[0.0, 1.0], [0.5, 0.25]], "t", "x", "y", first=2)
    (picture,) = axes.images
    assert picture.get_array().tolist() == [[0.0, 1.0], [0.5, 0.25]]
    assert picture.get_clim() == (0, 1)
    assert picture.get_extent() == [-0.5, 1.5, 3.5, 1.5]  # rows 2 and 3, the first at the top
    shades = picture.cmap(picture.norm(picture.get_array()))[..., :3].mean(-1)
    assert shades[0, 0] > shades[1, 1] > shades[1, 0] > shades[0, 1]
    assert len(figure.axes) == 2  # and its scale


@sampled("count", [1, 300], every=2)
def test_pictures_have_one_size_and_cut_no_words(count):
    figure, axes = axes_in_a_row(2)
    draw_bars(axes[0], [1e-7] * count, "a title of some length", "tokens, most relevant first", "share")
    draw_lines(axes[1], {"agreement with value norm": [1e9] * count}, "t", "x", "y")
    assert clipped_texts(figure) == []
    assert image_of(figure).size == (1440, 480)


def test_a_drawing_is_the_same_each_time_and_names_are_text():
    def drawn() -> str:
        figure = styled(lambda: Figure(figsize=(3, 2), layout="constrained"))()
        draw_lines(figure.subplots(), {"$\\frac <b> --> & \x07": [1, 2], "_hidden": [0, 1]}, "</title>", "x", "y")
        return str(svg_of(figure, "name", "</title><script>", "\"'&"))

    text = drawn()
    assert text == drawn()
    assert "<script" not in text
    assert "$\\frac &lt;b&gt; --&gt; &amp;" in text
    assert "date" not in text.lower()


def test_the_settings_of_others_stay():
    before = dict(rcParams)
    figure, (axes,) = axes_in_a_row(1)
    draw_lines(axes, {"a": [1.0, 2.0]}, "t", "x", "y")
    image_of(figure)
    assert dict(rcParams) == before


def test_commands_load_what_draws_only_when_they_draw():
    imports = "; ".join(f"import subtoken_train.cli.{name}" for name in ("main", "report", "diagnose", "evaluate"))
    program = f"import sys; {imports}; print([name for name in ('matplotlib', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_commands_that_draw_name_the_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda name: None)
    for command in (["report", str(tmp_path)], ["diagnose", "--adapter", "any"]):
        assert "needs matplotlib, which is not installed: pip install 'subtoken_train[report]'" in refused(
            capsys, *command
        )
    assert "matplotlib" not in refused(capsys, "report", str(tmp_path), "--format", "csv")  # nothing is drawn in it
