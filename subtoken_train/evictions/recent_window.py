"""Recent windows of eviction methods, as a number of entries or as a share of the budget.

A window of a fixed length leaves nothing to choose where the budget is no longer than it: at 1 % of 2,000 entries a
window of 64 is all that stays. VL-Cache (section 5) therefore fixes the window of every method that it compares at 10 %
of the budget.

Legend: B batch.
"""

from __future__ import annotations

from torch import Tensor

from subtoken_train.evictions.layer_views import LayerView
from subtoken_train.ledger.kv_budget import exact


def check_window(method: str, window: object, least: int) -> None:
    """Raise a worded ``ValueError`` unless a window is a whole number of entries or a share between 0 and 1.

    Args:
        method: its name, for the message.
        window: what was written; types are strict: ``64.0``, ``true`` and ``1.0`` are none.
        least: smallest number of entries.
    """
    entries = type(window) is int and window >= least
    if not entries and not (type(window) is float and 0 < window < 1):
        raise ValueError(
            f"{method} window={window!r} must be {least} or more entries, a whole number, or a share of the budget "
            "between 0 and 1, for instance 0.1"
        )


def share_of(count_B: Tensor, share: float) -> Tensor:
    """Return a share of whole numbers, int64, rounded down as the decimal that was written."""
    part = exact(share)
    return count_B * part.numerator // part.denominator


def window_length(view: LayerView, window: float) -> int | Tensor:
    """Return the entries of a window in a layer: the number itself, or [B, 1], the share of the budget, 1 at least."""
    if isinstance(window, int):
        return window
    assert view.budget is not None
    return share_of(view.budget(), window).clamp(min=1)[:, None]
