"""What the page draws: groups counted on a plan by hand, and pictures that change with the layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from subtoken_train.demo.drawings import group_picture, kept_groups, presets, token_picture
from subtoken_train.demo.side_by_side import SideBySide
from subtoken_train.resources import resource
from subtoken_train.types import LayerPlan, Plan, Region

REGIONS = torch.tensor([Region.SYSTEM, Region.VISUAL, Region.VISUAL, Region.VISUAL, Region.QUERY])


def test_groups_are_those_of_kept_visual_tokens():
    masks = torch.tensor([[[1, 1], [1, 0], [1, 1], [1, 1], [0, 0]]]).bool()
    routed = LayerPlan(torch.tensor([[0, 1, 3, 4, -1]]), masks)
    whole, none = LayerPlan(torch.tensor([[0, 1, 2, 3, 4]])), LayerPlan(torch.tensor([[0, 4]]))
    kept = kept_groups(Plan([whole, routed, none]), REGIONS)
    assert kept.shares_LS.tolist() == [[1, 1], [1, 0.5], [0, 0]]
    assert [marks.tolist() for marks in kept.marks_nS] == [[[True, True]] * 3, [[True, False], [True, True]], []]
    assert kept_groups(Plan([whole, none]), REGIONS) is None


@pytest.fixture(scope="module")
def answers():
    models = SideBySide(str(resource("checkpoints/adapters/tiny_fastv25_s16k4")), device="cpu")
    path, question = presets()[0]
    spoken = models.ask(Image.open(path).convert("RGB"), question, None, "1")
    return [each.answer for each in spoken if each.answer]


def test_pictures_follow_the_layer(answers):
    whole, routed = answers
    drawn = [np.array(token_picture(routed, layer)) for layer in (0, 5)]
    assert drawn[0].shape == drawn[1].shape
    assert (drawn[0] != drawn[1]).any()
    assert (np.array(token_picture(whole, 5)) != drawn[1]).any()
    groups = [np.array(group_picture(routed, layer)) for layer in (0, 5)]
    assert (groups[0] != groups[1]).any()
    assert group_picture(whole, 0) is None
