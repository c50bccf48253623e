"""The training objective on the rows that predict a label: cross-entropy and distillation; and the balance loss.

Legend: B batch, N positions, V vocabulary, L labelled targets of the batch, S value groups.
"""

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def predicting_rows(labels_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Mark rows that predict a label, bool [B, N], and return these labels [L], of the *reduced* sequence."""
    labelled = labels_BN[:, 1:] != IGNORE_INDEX
    return F.pad(labelled, (0, 1)), labels_BN[:, 1:][labelled]


def answer_loss(logits_LV: Tensor, targets_L: Tensor) -> Tensor:
    """Sum the cross-entropy over targets, fp32; over a window's targets it weighs every answer token alike."""
    return F.cross_entropy(logits_LV.float(), targets_L, reduction="sum")


def distillation_loss(logits_LV: Tensor, teacher_LV: Tensor, temperature: float) -> Tensor:
    """Sum T^2 * KL(teacher || student) over targets, fp32 (Hinton et al. 2015); no gradient to the teacher."""
    student_LV = F.log_softmax(logits_LV.float() / temperature, -1)
    softened_LV = F.log_softmax(teacher_LV.detach().float() / temperature, -1)
    return temperature**2 * F.kl_div(student_LV, softened_LV, reduction="sum", log_target=True)


def balance_loss(logits_BNS: Tensor, hard_BNS: Tensor, routed_BN: Tensor) -> Tensor:
    """Return S * sum_g f_g P_g of each sample, [B] in fp32; f: share of selections, P: mean softmax probability.

    A sample without a routed token gives 0, still connected to the logits (DDP). READING. The paper gives its weight,
    0.01, but neither form nor scale (appendix B.1). This is the form of mixture-of-experts routers, scaled so that
    balance is 1 for every S.
    """
    routed_BN1 = routed_BN[..., None]
    chosen_BS = (hard_BNS & routed_BN1).float().sum(1)
    share_BS = chosen_BS / chosen_BS.sum(-1, keepdim=True).clamp(min=1)
    mean_BS = (logits_BNS.float().softmax(-1) * routed_BN1).sum(1) / routed_BN1.sum(1).clamp(min=1)
    return hard_BNS.shape[-1] * (share_BS * mean_BS).sum(-1)
