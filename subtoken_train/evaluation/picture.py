"""The picture of one prompt with the visual tokens that each layer's cache keeps, drawn with Pillow.

It does not show which of a token's value groups stay, nor what a merged token is made of.

Legend: N sequence positions, T visual tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.family import Family
from subtoken_train.types import Batch, LayerPlan, Plan, Region

INK, PAPER, NIGHT = (40, 40, 40), (255, 255, 255), (24, 24, 27)
DIMMED = 0.8  # how far a dropped token's pixels go towards the paper
SIDE, SMALLEST_CELL, TITLE, MARGIN = 640, 24, 36, 8
"""Pixels: longer side of a panel, side of a token at least, height of a panel's title, room between panels."""


@dataclass(frozen=True)
class KeptTokens:
    """Holds how many heads keep each visual token, as a share, and how many groups stay (None, 0: no routing)."""

    share_T: Tensor
    groups_T: Tensor | None
    num_groups: int


def kept_tokens(layer: LayerPlan, shown_N: Tensor) -> KeptTokens:
    """Read the first sample of a layer's plan: of the tokens of the unreduced prompt that are marked, bool."""
    valid, shown_N = layer.entries_BN[0] >= 0, shown_N.cpu()
    entries, heads, groups = layer.entries_BN[0][valid].cpu(), layer.heads_BNh, layer.group_mask_BNS
    share_N, groups_N = torch.zeros(len(shown_N)), torch.zeros(len(shown_N), dtype=torch.long)
    share_N[entries] = torch.ones(len(entries)) if heads is None else heads[0][valid].float().mean(-1).cpu()
    if groups is None:
        return KeptTokens(share_N[shown_N], None, 0)
    groups_N[entries] = groups[0][valid].sum(-1).cpu()
    return KeptTokens(share_N[shown_N], groups_N[shown_N], groups.shape[-1])


def check_drawable(family: Family) -> None:
    """Raise a worded ``ValueError`` where a picture's tokens make no one grid."""
    if family.in_tiles:
        raise ValueError(f"{family.name} sees pictures in tiles, which are not drawn; leave the drawing out")


def check_places(backbone: CompressedBackbone) -> None:
    """Raise a worded ``ValueError`` where what a reducer leaves has no place in the picture."""
    if backbone.placeless:
        who = f"{backbone.reducer.name} on {backbone.family.name}"
        raise ValueError(f"{who} renumbers its tokens, so they have no place in the picture; leave the drawing out")


def visual_grid(family: Family, batch: Batch) -> tuple[int, int]:
    """Return rows and columns of the visual tokens of a prompt's only image; no grid is a ``ValueError``."""
    check_drawable(family)
    tokens = int((batch.regions_BN[0] == Region.VISUAL).sum())
    if batch.image_grid_I3 is not None:
        config = family.model.config  # Mistral3 has it beside its tower's
        merge = getattr(config, "spatial_merge_size", None) or config.vision_config.spatial_merge_size
        _, height, width = batch.image_grid_I3[0].tolist()
        return height // merge, width // merge
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise ValueError(f"{tokens} visual tokens do not form a square: this tower's class token is among them")
    return side, side


def kept_picture(
    image: Image.Image, family: Family, batch: Batch, plan: Plan, layers: Sequence[int], dark: bool = False
) -> Image.Image:
    """Draw a panel per layer of one sample's image (RGB): tokens dimmed by dropped heads, kept groups counted."""
    rows, columns = visual_grid(family, batch)
    cell = max(SMALLEST_CELL, SIDE // max(rows, columns))
    seen = family.framed(image).resize((columns * cell, rows * cell))
    visual_N = batch.regions_BN[0] == Region.VISUAL
    ground, ink = (NIGHT, PAPER) if dark else (PAPER, INK)
    wide, paper = seen.width + 2 * MARGIN, Image.new("RGB", seen.size, ground)
    row = Image.new("RGB", (wide * len(layers), seen.height + TITLE + MARGIN), ground)
    draw = ImageDraw.Draw(row)
    for left, layer in zip(range(0, row.width, wide), layers, strict=True):
        kept = kept_tokens(plan.layers[layer], visual_N)
        depth = Image.new("L", (columns, rows))
        depth.putdata([round(255 * DIMMED * (1 - share)) for share in kept.share_T.tolist()])
        mask = depth.resize(seen.size, Image.Resampling.NEAREST)
        row.paste(Image.composite(paper, seen, mask), (left + MARGIN, TITLE))
        title = f"layer {layer}: {int((kept.share_T > 0).sum())} of {len(kept.share_T)} visual tokens"
        if kept.groups_T is not None:
            title += f", {int(kept.groups_T.sum())} of {kept.num_groups * len(kept.share_T)} groups"
            font = ImageFont.load_default(min(18, cell // 2))
            for place, (share, groups) in enumerate(zip(kept.share_T.tolist(), kept.groups_T.tolist(), strict=True)):
                if share:
                    x, y = left + MARGIN + (place % columns + 0.5) * cell, TITLE + (place // columns + 0.5) * cell
                    draw.text((x, y), str(groups), PAPER, font, "mm", stroke_width=2, stroke_fill=INK)
        draw.text((left + wide / 2, TITLE / 2), title, ink, ImageFont.load_default(22), "mm")
    return row
