"""The training objective: token-normalised cross-entropy.

Legend: B batch, N positions, V vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def answer_loss(logits_BNV: Tensor, labels_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Summed next-token cross-entropy over labelled positions, and their number.

    Args:
        logits_BNV: logits of each position (of the *reduced* sequence).
        labels_BN: token ids of the same positions; ``IGNORE_INDEX`` (-100) where there is no loss.

    Returns:
        (sum of losses in fp32, number of labelled targets as a long scalar). Dividing by the number over a whole
        accumulation window keeps every answer token's weight equal, however samples are split into micro-batches.
    """
    targets = labels_BN[:, 1:]
    labelled = targets != IGNORE_INDEX
    total = F.cross_entropy(logits_BNV[:, :-1][labelled].float(), targets[labelled], reduction="sum")
    return total, labelled.sum()
