"""Check that a model gives numbers: NaN and infinity (fp16 that overflows, damaged weights) end in one sentence.

Legend: B batch, M rows of a pass, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from subtoken_train.errors import no_numbers


def are_finite(tensor: Tensor) -> Tensor:
    """Return whether a tensor holds neither NaN nor infinity, a scalar bool on its device; an empty one does not."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    low, high = tensor.aminmax()  # NaN where any number is
    return low.isfinite() & high.isfinite()


@torch.no_grad()
def check_states(hidden_BMD: Tensor, visible_BM: Tensor, names: Sequence[str]) -> None:
    """Raise a worded ``ValueError`` where real rows of a pass hold NaN or infinity; the device is read once.

    Args:
        hidden_BMD: the last layer's output.
        visible_BM: real rows, bool.
        names: of the samples.
    """
    low_BM, high_BM = hidden_BMD.aminmax(dim=-1)
    broken_B = (~(low_BM.isfinite() & high_BM.isfinite()) & visible_BM.to(low_BM.device)).any(-1)
    _raise_first(broken_B, names, hidden_BMD.dtype)


def broken_rows(logits_BV: Tensor) -> Tensor:
    """Return the rows whose logits choose no token, bool [B]: NaN or +inf among them, or all -inf.

    A model may give -inf to single tokens, which it never says.
    """
    return ~logits_BV.amax(-1).isfinite()


@torch.no_grad()
def check_logits(logits_BV: Tensor, names: Sequence[str]) -> None:
    """Raise a worded ``ValueError`` where a sample's logits are ``broken_rows``; the device is read once."""
    _raise_first(broken_rows(logits_BV), names, logits_BV.dtype)


def _raise_first(broken_B: Tensor, names: Sequence[str], dtype: torch.dtype) -> None:
    marks = broken_B.tolist()
    if any(marks):
        raise no_numbers(f"for {names[marks.index(True)][:80]!r}", dtype)
