"""The training objective: token-normalised cross-entropy, on the rows that predict a label.

Legend: B batch, N positions, V vocabulary, L labelled targets of the batch.
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
