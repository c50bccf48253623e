"""The training objective: token-normalised cross-entropy on the rows that predict a label, and the balance loss.

Legend: B batch, N positions, V vocabulary, L labelled targets of the batch, S value groups.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def predicting_rows(labels_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows predict a label; the head need not run on the others.

    Args:
        labels_BN: token ids of the rows of the *reduced* sequence; ``IGNORE_INDEX`` (-100) where there is no loss.

    Returns:
        (rows followed by a labelled one, bool [B, N]; the labels that they predict, int64 [L], in the rows' order).
    """
    labelled = labels_BN[:, 1:] != IGNORE_INDEX
    return F.pad(labelled, (0, 1)), labels_BN[:, 1:][labelled]


def answer_loss(logits_LV: Tensor, targets_L: Tensor) -> Tensor:
    """Cross-entropy summed over targets, a scalar in fp32.

    Divided by the number of targets of a whole accumulation window, it gives every answer token the same weight,
    however samples are split into micro-batches.
    """
    return F.cross_entropy(logits_LV.float(), targets_L, reduction="sum")


def balance_loss(logits_BNS: Tensor, hard_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """S * sum_g f_g P_g of each sample, [B]; f is the share of selections, P the mean softmax probability.

    Only routed tokens count (``routed_BN``, bool [B, N]). A sample without one gives 0, still connected to the
    logits, so that every router takes part in every step (DDP). 1 is perfect balance. Computed in fp32. Averaging
    over samples is left to the caller: the loss is linear in the batch, so two processes give the loss of one. (Samples
    that are read as one, [1, B * N], give the loss of the batch, which is not.)
    """
    routed_BN1 = routed_BN[..., None]
    chosen_BS = (hard_BNS & routed_BN1).float().sum(1)
    share_BS = chosen_BS / chosen_BS.sum(-1, keepdim=True).clamp(min=1)
    probability_BNS = logits_BNS.float().softmax(-1) * routed_BN1
    mean_BS = probability_BNS.sum(1) / routed_BN1.sum(1).clamp(min=1)
    return hard_BNS.shape[-1] * (share_BS * mean_BS).sum(-1)
