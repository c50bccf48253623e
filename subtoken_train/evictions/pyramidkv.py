"""PyramidKV (Cai et al., 2024): SnapKV's scores, with more entries in the lower layers and fewer in the higher ones.

Source: section 3.2 of "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling" and its code:
without the window every layer has ``base`` entries on average; the last layer gets ``base // beta``, the first what
makes their mean ``base``, those between lie on a line. No layer gets more than its entries: then the line is flatter.
The code rounds the line's step down, so that all layers together keep more than the budget (up to half as much again in
a deep model with a small one). The default draws the same line without that, and meets the budget exactly.
What it does not do: as SnapKV.

Legend: B batch, N cached rows of the prompt, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from subtoken_train.errors import unknown_name
from subtoken_train.evictions.base import Candidates, LayerScores
from subtoken_train.evictions.snapkv import SnapKV

Convention = Literal["exact", "original", "kvpress"]


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with a pyramid of budgets; see ``SnapKV`` for its settings.

    Attributes:
        beta: how steep the pyramid is: the last layer keeps ``base // beta`` entries beside the window; 1 is flat.
        budgets: ``exact``: the original's line, all layers together keep exactly the budget. ``original``: with the
            released code's whole-number step; keeps more than the budget unless layers - 1 divides the line's fall.
            ``kvpress``: the line runs through whole budgets, the window inside; off by what rounding leaves.

    Raises:
        ValueError: see ``SnapKV``; or beta below 1, or an unknown convention.
    """

    name: ClassVar[str] = "pyramidkv"

    beta: int = 20
    budgets: Convention = "exact"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise ValueError(f"pyramidkv beta={self.beta} must be 1 or more")
        if self.budgets not in get_args(Convention):
            raise unknown_name("pyramidkv budgets", self.budgets, get_args(Convention))

    def counts(self, scores: list[LayerScores], candidates: Candidates) -> Tensor:
        """The pyramid of every sample, [L, B]; the window is what of it competes in this sample and layer."""
        competes_LBN, layers = candidates.competes_LBN, len(scores)
        entries_LB = torch.stack([competes_BN.sum(-1) for competes_BN in competes_LBN])
        window_LB = torch.stack(
            [
                (layer.protected_BN & competes_BN).sum(-1)
                for layer, competes_BN in zip(scores, competes_LBN, strict=True)
            ]
        )
        columns = []
        for sample in torch.stack([candidates.budget_LB, entries_LB, window_LB]).unbind(-1):
            budget, entries, window = sample.tolist()
            if self.budgets == "exact":
                columns.append(exact_pyramid(budget, entries, window, self.beta))
            else:
                formula = original_count if self.budgets == "original" else kvpress_count
                numbers = enumerate(zip(budget, entries, window, strict=True))
                columns.append([formula(*layer, self.beta, index, layers) for index, layer in numbers])
        return torch.tensor(columns, device=candidates.budget_LB.device).T


def exact_pyramid(budget: Sequence[int], entries: Sequence[int], window: Sequence[int], beta: int) -> list[int]:
    """Entries of every layer, whose sum is that of the budgets; each lies between 1 and the layer's entries.

    Budgets move along a line: layer l gets (L - 1 - 2 l) / (L - 1) of the largest shift that every layer has room for.
    Shares of an entry go to the layers with the largest ones, ties to the lower layer. Layers may differ.
    """
    layers = len(budget)
    if layers == 1 or any(have < 2 * (most - last) for most, have, last in zip(budget, entries, window, strict=True)):
        return list(budget)
    slopes = [Fraction(layers - 1 - 2 * layer, layers - 1) for layer in range(layers)]
    room = []
    for slope, most, have, last in zip(slopes, budget, entries, window, strict=True):
        least = max(last + (most - last) // beta, 1)
        if slope:
            room.append((have - most if slope > 0 else most - least) / abs(slope))
    shift = max(min(room), Fraction(0))
    ideal = [most + slope * shift for most, slope in zip(budget, slopes, strict=True)]
    counts = [int(share // 1) for share in ideal]
    by_remainder = sorted(range(layers), key=lambda layer: (counts[layer] - ideal[layer], layer))
    for layer in by_remainder[: sum(budget) - sum(counts)]:
        counts[layer] += 1
    return counts


def original_count(budget: int, entries: int, window: int, beta: int, layer: int, layers: int) -> int:
    """Entries of one layer as the released code counts them; ``budget`` includes the window.

    A budget that is no more than the window, where the code fails, stays as it is.
    """
    base = budget - window
    if base <= 0 or layers == 1 or entries < 2 * base:
        return budget
    least = base // beta
    most = 2 * base - least
    if most >= entries - window:
        most = entries - window
        least = 2 * base - most
    return most - layer * ((most - least) // (layers - 1)) + window


def kvpress_count(budget: float, entries: int, window: int, beta: int, layer: int, layers: int) -> int:
    """Entries of one layer as kvpress counts them, rounded half to even; flat where its line does not fit.

    Args:
        budget: may be a fraction of an entry here (kvpress rounds only the result).
        entries: entries of the layer.
        window: the least that a layer may keep.
        beta: see ``PyramidKV``.
        layer: the layer, from 0.
        layers: number of layers.
    """
    least = budget / beta
    most = 2 * budget - least
    if most >= entries - window:
        most = entries - window
        least = 2 * budget - most
    if layers == 1 or not entries >= most >= least >= window:
        return round(budget)
    return round(most - layer * ((most - least) / (layers - 1)))
