"""Regions of a prompt that a plan leaves without a single entry: the model cannot look at them any more.

Legend: B batch, N positions of the prompts, R regions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from subtoken_train.functional.gather import take_rows
from subtoken_train.types import Plan, Region


def emptied_regions(plan: Plan, regions_BN: Tensor) -> list[dict[str, int]]:
    """Per sample: region -> layers in which no head keeps an entry of it, of those that had entries in the prompt.

    Args:
        plan: one ``LayerPlan`` per layer.
        regions_BN: ``Region`` codes of the rows that the plan counts in.
    """
    codes_R = torch.tensor([region for region in Region if region != Region.PADDING], device=regions_BN.device)
    had_BR = (regions_BN[..., None] == codes_R).any(1)
    layers_BR = torch.zeros_like(had_BR, dtype=torch.long)
    for layer in plan.layers:
        valid_BN = layer.entries_BN >= 0
        kept_BN = take_rows(regions_BN, layer.entries_BN.clamp(min=0)).masked_fill(~valid_BN, Region.PADDING)
        layers_BR += had_BR & ~(kept_BN[..., None] == codes_R).any(1)
    names = [Region(code).label for code in codes_R.tolist()]
    return [{name: n for name, n in zip(names, row, strict=True) if n} for row in layers_BR.tolist()]


def emptied_words(emptied: Sequence[dict[str, int]], compression: str) -> str | None:
    """What to say of it, on one line; None where every region keeps something.

    Args:
        emptied: what ``emptied_regions`` found, of every prompt.
        compression: its label.
    """
    prompts = Counter(region for sample in emptied for region in sample)
    if not prompts:
        return None
    regions = ", ".join(f"{region} ({count:,} of {len(emptied):,} prompts)" for region, count in prompts.items())
    return (
        f"{compression}: nothing is left of a whole region in some layer: {regions}; what follows cannot look at it "
        "there. Raise eviction_keep, or take scope context"
    )
