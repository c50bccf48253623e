"""Norms as an offset of router logits.

Legend: B batch, N positions, S value groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_NORM = 1e-6
"""Added to norms, so that an empty group has a logarithm."""
_LEAST_DEVIATION = 1e-4
"""Equal norms differ by rounding, which must not be blown up."""


@torch.no_grad()
def standardised_log(norms_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """``log(norm)`` with mean 0 and deviation 1 over the routed (token, group) pairs of each sample, fp32 [B, N, S].

    One mean and one deviation per sample: within a token *and* between a sample's tokens the order is that of the
    norms, so the offset is that selector under a fixed, a ranked and a global budget alike; and a sample never depends
    on the batch around it. Unrouted tokens, and samples without a routed one, get 0. No gradient.
    """
    unrouted_BN1 = ~routed_BN[..., None]
    pairs_B11 = (routed_BN.sum(-1) * norms_BNS.shape[-1]).clamp(min=1)[:, None, None]
    logs_BNS = (norms_BNS.float() + _LEAST_NORM).log().masked_fill(unrouted_BN1, 0)
    mean_B11 = logs_BNS.sum((1, 2), keepdim=True) / pairs_B11
    centred_BNS = (logs_BNS - mean_B11).masked_fill(unrouted_BN1, 0)
    deviation_B11 = (centred_BNS.square().sum((1, 2), keepdim=True) / pairs_B11).sqrt()
    return centred_BNS / deviation_B11.clamp(min=_LEAST_DEVIATION)
