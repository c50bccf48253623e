"""Charts and the picture of kept tokens show what the numbers say; bootstrap intervals."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from subtoken_train.evaluation import charts, intervals
from subtoken_train.evaluation.intervals import bootstrap_interval
from subtoken_train.evaluation.picture import MARGIN, TITLE, kept_picture, kept_tokens, visual_grid
from subtoken_train.types import LayerPlan, Plan, Region
from tests.support.helpers import make_batch
from tests.support.refusals import refuses
from tests.support.report_results import clipped_texts
from tests.support.sampling import sampled
from tests.support.tiny.llava import next_family
from tests.support.tiny.qwen import qwen_batch, qwen_family, qwen_records


def test_what_is_drawn_is_what_the_numbers_say():
    _, (bars, lines) = charts.axes_in_a_row(2)
    charts.draw_bars(bars, [0.0, 0.25, 0.5, 0.1], "t", "x", "y")
    assert [bar.get_height() for bar in bars.patches] == [0.0, 0.25, 0.5, 0.1]
    assert [bar.get_center()[0] for bar in bars.patches] == pytest.approx([0, 1, 2, 3])
    assert (bars.get_title(), bars.get_xlabel(), bars.get_ylabel()) == ("t", "x", "y")
    charts.draw_lines(lines, {"a": [0, 4, 2], "b": [1, 1, 1]}, "t", "x", "y", first=3)
    assert [line.get_xydata().tolist() for line in lines.lines] == [[[3, 0], [4, 4], [5, 2]], [[3, 1], [4, 1], [5, 1]]]
    assert [text.get_text() for text in lines.get_legend().get_texts()] == ["a", "b"]
    assert len({line.get_color() for line in lines.lines}) == 2
    assert lines.get_ylim()[0] == 0
    figure, (axes,) = charts.axes_in_a_row(1)
    charts.draw_cells(axes, [[0.0, 1.0], [0.5, 0.25]], "t", "x", "y", first=2)
    (picture,) = axes.images
    assert picture.get_array().tolist() == [[0.0, 1.0], [0.5, 0.25]]
    assert picture.get_clim() == (0, 1)
    assert picture.get_extent() == [-0.5, 1.5, 3.5, 1.5]  # rows 2 and 3, the first at the top
    shades = picture.cmap(picture.norm(picture.get_array()))[..., :3].mean(-1)
    assert shades[0, 0] > shades[1, 1] > shades[1, 0] > shades[0, 1]
    assert len(figure.axes) == 2  # and its scale


@sampled("count", [1, 300], every=2)
def test_pictures_have_one_size_and_cut_no_words(count):
    figure, axes = charts.axes_in_a_row(2)
    charts.draw_bars(axes[0], [1e-7] * count, "a title of some length", "tokens, most relevant first", "share")
    charts.draw_lines(axes[1], {"agreement with value norm": [1e9] * count}, "t", "x", "y")
    assert clipped_texts(figure) == []
    assert charts.image_of(figure).size == (1440, 480)


def test_a_drawing_is_the_same_each_time_and_names_are_text():
    def drawn() -> str:
        figure = charts.styled(lambda: Figure(figsize=(3, 2), layout="constrained"))()
        lines = {"$\\frac <b> --> & \x07": [1, 2], "_hidden": [0, 1]}
        charts.draw_lines(figure.subplots(), lines, "</title>", "x", "y")
        return str(charts.svg_of(figure, "name", "</title><script>", "\"'&"))

    text = drawn()
    assert text == drawn()
    assert "<script" not in text
    assert "$\\frac &lt;b&gt; --&gt; &amp;" in text
    assert "date" not in text.lower()


def test_matches_the_normal_approximation():
    scores = (np.random.default_rng(0).random(4000) < 0.3).astype(float)
    low, high = bootstrap_interval(scores)
    half = 1.96 * scores.std() / np.sqrt(len(scores))
    assert low == pytest.approx(scores.mean() - half, abs=0.15 * half)
    assert high == pytest.approx(scores.mean() + half, abs=0.15 * half)


def test_same_seed_same_interval_and_no_scores():
    assert bootstrap_interval([0.0, 1.0, 1.0]) == bootstrap_interval([0.0, 1.0, 1.0])
    assert bootstrap_interval([1.0]) == (1.0, 1.0)
    refuses("no scores", bootstrap_interval, [])


@pytest.mark.parametrize("shape", [(1, 7), (3, 40)])
def test_kept_draws_are_the_draws(shape, monkeypatch):
    scores = np.random.default_rng(5).random(shape)
    kept = bootstrap_interval(scores)
    monkeypatch.setattr(intervals, "KEPT_QUESTIONS", 0)
    assert bootstrap_interval(scores) == kept


RED = (200, 0, 0)


def cells(panel, rows, columns):
    """A pixel near the corner of every cell, away from the numbers in the middle."""
    pixels = np.array(panel)[TITLE : panel.height - MARGIN, MARGIN : panel.width - MARGIN]
    high, wide = pixels.shape[0] // rows, pixels.shape[1] // columns
    return pixels[high // 16 :: high, wide // 16 :: wide].reshape(rows * columns, 3)


def layer_plan(regions, visual, groups=None, heads=None, device="cpu"):
    """A layer that keeps all text and the visual tokens ``visual``, with their group masks and heads."""
    text = (regions != Region.VISUAL).nonzero()[:, 0]
    entries = torch.cat([text, torch.tensor(visual) + int((regions == Region.VISUAL).nonzero()[0])])
    order = entries.argsort()
    padded = torch.cat([entries[order], torch.tensor([-1])])[None]

    def with_text(marks):
        if marks is None:
            return None
        whole = torch.ones(len(text), len(marks[0]), dtype=torch.bool)
        return torch.cat([torch.cat([whole, torch.tensor(marks).bool()])[order], whole[:1]])[None].to(device)

    return LayerPlan(padded.to(device), with_text(groups), with_text(heads))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kept_tokens_count_groups_and_heads(device):
    regions = make_batch([(1, 6)]).regions_BN[0]
    plan = layer_plan(regions, [3, 63], [[1, 0, 1, 0], [1, 1, 1, 1]], [[1, 0], [1, 1]], device)
    kept = kept_tokens(plan, regions == Region.VISUAL)
    assert kept.share_T.nonzero()[:, 0].tolist() == [3, 63]
    assert kept.share_T[[3, 63]].tolist() == [0.5, 1]
    assert kept.groups_T[[3, 63]].tolist() == [2, 4]
    assert (kept.groups_T.sum(), kept.num_groups) == (6, 4)
    assert kept_tokens(layer_plan(regions, [0], device=device), regions == Region.VISUAL).groups_T is None


@pytest.mark.parametrize("groups", [None, [[1, 0], [1, 1], [1, 0]]])
def test_kept_cells_show_the_image_and_others_are_dimmed(tiny_family, groups):
    batch = make_batch([(1, 6)])
    regions = batch.regions_BN[0]
    plan = Plan([layer_plan(regions, list(range(64)))] * 2 + [layer_plan(regions, [0, 9, 63], groups, None)])
    picture = kept_picture(Image.new("RGB", (50, 50), RED), tiny_family, batch, plan, [2, 0])
    half = picture.width // 2
    pruned, whole = (cells(picture.crop((x, 0, x + half, picture.height)), 8, 8) for x in (0, half))
    assert (whole == RED).all()
    shown = (pruned == RED).all(-1)
    assert shown.nonzero()[0].tolist() == [0, 9, 63]
    assert (pruned[~shown] == (244, 204, 204)).all()


def test_heads_of_their_own_dim_by_their_share(tiny_family):
    batch = make_batch([(1, 6)])
    plan = Plan([layer_plan(batch.regions_BN[0], [0, 1], None, [[1, 1, 1, 1], [1, 0, 0, 0]])])
    found = cells(kept_picture(Image.new("RGB", (50, 50), RED), tiny_family, batch, plan, [0]), 8, 8)[:, 1]
    assert found[0] < found[1] < found[2]


def test_llava_pads_to_the_square_that_the_model_saw(tiny_family):
    batch = make_batch([(1, 6)])
    plan = Plan([layer_plan(batch.regions_BN[0], list(range(64)))])
    found = cells(kept_picture(Image.new("RGB", (100, 50), RED), tiny_family, batch, plan, [0]), 8, 8).reshape(8, 8, 3)
    assert (found[3:6] == RED).all()
    assert (found[[0, 1, 7]] == 128).all()


def test_qwen_grids_follow_the_image(tmp_path):
    family = qwen_family()
    batch = qwen_batch(family, qwen_records(tmp_path)[:1], generation=True)
    assert visual_grid(family, batch) == (3, 4)
    plan = Plan([layer_plan(batch.regions_BN[0], [5])])
    picture = kept_picture(Image.new("RGB", (112, 84), RED), family, batch, plan, [0])
    assert (cells(picture, 3, 4) == RED).all(-1).nonzero()[0].tolist() == [5]


def test_what_is_not_drawn(tiny_family):
    with pytest.raises(ValueError, match="65 visual tokens do not form a square: this tower's class token is"):
        visual_grid(tiny_family, make_batch([(1, 6)], visual=65))
    refuses("llava_next sees pictures in tiles, which are not drawn", visual_grid, next_family(), make_batch([(1, 6)]))
