"""Parts of the attention that several eviction methods read: rows that ask about the prompt's body, windows, sums.

A window is a number of entries or a share of the budget: one as long as the budget leaves nothing to choose. VL-Cache
(section 5) fixes that of every method at 10 %.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from subtoken_train.functional.gather import kept_index, last_marked
from subtoken_train.ledger.kv_budget import exact
from subtoken_train.types import Region, in_compressed_region
from subtoken_train.view.method import checked_setting
from subtoken_train.view.view import View

GroupReduction = Literal["mean", "max"]
Pooling = Literal["avg", "max"]


def task_rows(regions_BN: Tensor) -> Tensor:
    """Mark the entries after the body (VISUAL, CONTEXT) of a prompt, bool [B, N]: those that ask about it."""
    entries_BN, after_BN = regions_BN != Region.PADDING, _after_body(regions_BN)
    none_B1 = ~after_BN.any(-1, keepdim=True)
    return after_BN | (none_B1 & last_marked(entries_BN, none_B1.long()))


def unasked(regions_BN: Tensor) -> Tensor:
    """Mark samples that end with their body, bool [B]: without a question, ``task_rows`` marks the last entry alone."""
    return in_compressed_region(regions_BN).any(-1) & ~_after_body(regions_BN).any(-1)


def _after_body(regions_BN: Tensor) -> Tensor:
    return (regions_BN != Region.PADDING) & (in_compressed_region(regions_BN).flip(-1).cumsum(-1).flip(-1) == 0)


def over_groups(scores_BHN: Tensor, kv_heads: int, how: GroupReduction = "mean") -> Tensor:
    """Take the mean or maximum over the query heads of each key-value head, [B, h, N]."""
    batch, heads, length = scores_BHN.shape
    grouped = scores_BHN.view(batch, kv_heads, heads // kv_heads, length)
    return grouped.mean(2) if how == "mean" else grouped.amax(2)


def neighbours_pooled(scores: Tensor, pooled_BN: Tensor, kernel: int, pooling: Pooling) -> Tensor:
    """Pool scores [B, H, N] over ``kernel`` neighbours among ``pooled_BN``; 0 elsewhere and beyond the edges."""
    order = pooled_BN.int().sort(dim=-1, descending=True, stable=True).indices[:, None].expand_as(scores)
    packed = scores.masked_fill(~pooled_BN[:, None], 0.0).gather(-1, order)
    packed = (F.avg_pool1d if pooling == "avg" else F.max_pool1d)(packed, kernel, stride=1, padding=kernel // 2)
    return torch.zeros_like(scores).scatter(-1, order, packed).masked_fill(~pooled_BN[:, None], 0.0)


def kernel_setting(default: int) -> Any:
    """Declare a setting that must be odd, since a kernel has a middle."""

    def check(name: str, kernel: int) -> None:
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"{name}={kernel} must be an odd number, 1 or more")

    return checked_setting(default, check)


def window_setting(default: float, least: int = 1) -> Any:
    """Declare a window: a whole number of entries, or a share between 0 and 1; ``64.0`` and ``true`` are refused."""

    def check(name: str, window: object) -> None:
        entries = type(window) is int and window >= least
        if not entries and not (type(window) is float and 0 < window < 1):
            share = "or a share of the budget between 0 and 1, for instance 0.1"
            raise ValueError(f"{name}={window!r} must be {least} or more entries, a whole number, {share}")

    return checked_setting(default, check)


def share_of(count_B: Tensor, share: float) -> Tensor:
    """Return a share of whole numbers, int64, rounded down as the decimal that was written."""
    part = exact(share)
    return count_B * part.numerator // part.denominator


def window_rows(view: View, window: float) -> tuple[Tensor, Tensor]:
    """Mark a window, bool [B, N], and list its rows, ascending, int64 [B, W]; -1 pads samples with fewer."""
    window_BN = view.window(window_length(view, window))
    longest = min(window, window_BN.shape[1]) if isinstance(window, int) else None
    index_BW, valid_BW = kept_index(window_BN, pad_left=True, longest=longest)
    return window_BN, index_BW.masked_fill(~valid_BW, -1)


def window_length(view: View, window: float) -> int | Tensor:
    """Return a window's length in a layer: the number itself, or [B, 1], the share of the budget, 1 at least."""
    return window if isinstance(window, int) else share_of(view.budget(), window).clamp(min=1)[:, None]
