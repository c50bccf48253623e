"""Load-balance loss over value groups.

Legend: B batch, N positions, S groups.
"""

from __future__ import annotations

from torch import Tensor


def balance_loss(logits_BNS: Tensor, hard_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """S * sum_g f_g P_g of each sample, [B]; f is the share of selections, P the mean softmax probability.

    Only routed tokens count (``routed_BN``, bool [B, N]). A sample without one gives 0, still connected to the
    logits, so that every router takes part in every step (DDP). 1 is perfect balance. Computed in fp32. Averaging
    over samples is left to the caller: the loss is linear in the batch, so two processes give the loss of one.
    """
    routed_BN1 = routed_BN[..., None]
    chosen_BS = (hard_BNS & routed_BN1).float().sum(1)
    share_BS = chosen_BS / chosen_BS.sum(-1, keepdim=True).clamp(min=1)
    probability_BNS = logits_BNS.float().softmax(-1) * routed_BN1
    mean_BS = probability_BNS.sum(1) / routed_BN1.sum(1).clamp(min=1)
    return hard_BNS.shape[-1] * (share_BS * mean_BS).sum(-1)
