"""Quest's upper bound on the attention logits of a page of keys.

Legend: B batch (or rows), h key-value heads, d head width, P pages.
"""

from __future__ import annotations

import torch
from torch import Tensor


def page_bound(positive_Bhd: Tensor, negative_Bhd: Tensor, low_BhPd: Tensor, high_BhPd: Tensor) -> Tensor:
    """sum_d max(q_d * low_d, q_d * high_d) of each page, [B, h, P], unscaled, in the dtype that all arguments have.

    It is linear in the positive and in the negative part of a query, so the mean of several queries' bounds is the
    bound of their mean parts.

    Args:
        positive_Bhd: the query where it is positive, 0 elsewhere.
        negative_Bhd: the query where it is negative.
        low_BhPd: smallest value of each channel in a page.
        high_BhPd: largest value.
    """
    bound_BhP = torch.einsum("bhd,bhpd->bhp", positive_Bhd, high_BhPd)
    return bound_BhP + torch.einsum("bhd,bhpd->bhp", negative_Bhd, low_BhPd)
