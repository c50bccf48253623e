"""What the page draws of an answer: kept tokens on the picture, and kept value groups. Pure functions of a plan.

Legend: N positions, n kept tokens, S value groups, L layers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from subtoken_train.demo.side_answer import SideAnswer
from subtoken_train.evaluation.charts import axes_in_a_row, draw_cells, image_of
from subtoken_train.evaluation.picture import kept_picture
from subtoken_train.types import LayerPlan, Plan, Region

_matplotlib = threading.Lock()  # its settings are the process's


@dataclass(frozen=True)
class KeptGroups:
    """The value groups that a plan keeps of the visual tokens.

    Attributes:
        shares_LS: of the tokens that a layer keeps, the share that keeps each group, fp32; ones where all groups stay.
        marks_nS: per layer, the groups of each kept token in the prompt's order, bool.
    """

    shares_LS: Tensor
    marks_nS: list[Tensor]


def kept_groups(plan: Plan, regions_N: Tensor) -> KeptGroups | None:
    """Read the first sample of a plan; None where no layer is routed.

    Args:
        plan: what a cache keeps.
        regions_N: ``Region`` codes of the unreduced prompt.
    """
    groups = next((layer.group_mask_BNS.shape[-1] for layer in plan.layers if layer.group_mask_BNS is not None), None)
    if groups is None:
        return None
    marks = [_marks(layer, regions_N, groups) for layer in plan.layers]
    # a layer that keeps no visual token keeps none of their groups
    return KeptGroups(torch.stack([each.float().sum(0) / max(1, len(each)) for each in marks]), marks)


def _marks(layer: LayerPlan, regions_N: Tensor, groups: int) -> Tensor:
    valid = layer.entries_BN[0] >= 0
    entries = layer.entries_BN[0][valid].cpu()
    visual = regions_N.cpu()[entries] == Region.VISUAL
    if layer.group_mask_BNS is None:
        return torch.ones(int(visual.sum()), groups, dtype=torch.bool)
    return layer.group_mask_BNS[0][valid].cpu()[visual]


def token_picture(answer: SideAnswer, layer: int) -> Image.Image:
    """The picture with the tokens that a layer keeps; as it is where they cannot be drawn (``answer.undrawn``)."""
    if answer.undrawn is not None:
        return answer.image
    return kept_picture(answer.image, answer.family, answer.batch, answer.plan, [layer])


def group_picture(answer: SideAnswer, layer: int) -> Image.Image | None:
    """Kept groups of all layers, and beside them those of every kept token in one; None where nothing is routed."""
    kept = kept_groups(answer.plan, answer.batch.regions_BN[0])
    if kept is None:
        return None
    marks_nS = kept.marks_nS[layer]
    with _matplotlib:
        figure, (left, right) = axes_in_a_row(2)
        draw_cells(left, kept.shares_LS.tolist(), "share of the kept tokens that keep a group", "group", "layer")
        title = f"layer {layer}: groups of its {len(marks_nS)} kept tokens"
        if len(marks_nS):
            draw_cells(right, marks_nS.float().tolist(), title, "group", "kept token, in the picture's order")
        else:
            right.set(title=title)
        return image_of(figure)
