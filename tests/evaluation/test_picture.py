"""The picture of kept tokens: kept cells show the image, dropped ones are dimmed, titles count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from subtoken_train.evaluation.picture import MARGIN, TITLE, kept_picture, kept_tokens, visual_grid
from subtoken_train.types import LayerPlan, Plan, Region
from tests.support.helpers import make_batch
from tests.support.tiny.llava_next import next_family
from tests.support.tiny.qwen import qwen_batch, qwen_family, qwen_records

RED = (200, 0, 0)


def cells(panel, rows, columns):
    """A pixel near the corner of every cell, away from the numbers in the middle."""
    pixels = np.array(panel)[TITLE : panel.height - MARGIN, MARGIN : panel.width - MARGIN]
    high, wide = pixels.shape[0] // rows, pixels.shape[1] // columns
    return pixels[high // 16 :: high, wide // 16 :: wide].reshape(rows * columns, 3)


def layer_plan(regions, visual, groups=None, heads=None, device="cpu"):
    """A layer that keeps all text and the visual tokens ``visual``, with their group masks and heads."""
    first = int((regions == Region.VISUAL).nonzero()[0])
    text = (regions != Region.VISUAL).nonzero()[:, 0]
    entries = torch.cat([text, torch.tensor(visual) + first])
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
    plan = Plan(
        [layer_plan(batch.regions_BN[0], list(range(64)))] * 2
        + [layer_plan(batch.regions_BN[0], [0, 9, 63], groups, None)]
    )
    picture = kept_picture(Image.new("RGB", (50, 50), RED), tiny_family, batch, plan, [2, 0])
    half = picture.width // 2
    pruned, whole = (cells(picture.crop((x, 0, x + half, picture.height)), 8, 8) for x in (0, half))
    assert (whole == RED).all()
    shown = (pruned == RED).all(-1)
    assert shown.nonzero()[0].tolist() == [0, 9, 63]
    assert (pruned[~shown] == (244, 204, 204)).all()


def test_heads_of_their_own_dim_by_their_share(tiny_family):
    batch = make_batch([(1, 6)])
    heads = [[1, 1, 1, 1], [1, 0, 0, 0]]
    plan = Plan([layer_plan(batch.regions_BN[0], [0, 1], None, heads)])
    found = cells(kept_picture(Image.new("RGB", (50, 50), RED), tiny_family, batch, plan, [0]), 8, 8)[:, 1]
    assert found[0] < found[1] < found[2]


def test_llava_pads_to_the_square_that_the_model_saw(tiny_family):
    batch = make_batch([(1, 6)])
    plan = Plan([layer_plan(batch.regions_BN[0], list(range(64)))])
    picture = kept_picture(Image.new("RGB", (100, 50), RED), tiny_family, batch, plan, [0])
    found = cells(picture, 8, 8).reshape(8, 8, 3)
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
    with pytest.raises(
        ValueError, match="65 visual tokens do not form a square: this tower's class token is among them"
    ):
        visual_grid(tiny_family, make_batch([(1, 6)], visual=65))
    with pytest.raises(ValueError, match="llava_next sees pictures in tiles, which are not drawn"):
        visual_grid(next_family(), make_batch([(1, 6)]))
