"""VisionZip's selection and merging (Yang et al., 2024), as pure tensor functions on one image.

Dominant tokens are those that receive the most attention; of the rest, every few tokens one is a target, the others
join the target with the most similar key, and each target becomes target + mean of those that joined it (a sum, as
released, not an average).

Legend: T tokens of the image, C their width, d key width, k dominant tokens, c contextual tokens, R = T - k the rest.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from subtoken_train.functional.masks import top_indices


def dominant_tokens(received_T: Tensor, count: int) -> Tensor:
    """Indices [k] of the ``count`` tokens that receive the most attention, ascending; ties go to the lower index."""
    return top_indices(received_T, count).sort().values


def contextual_targets(rest: int, count: int) -> Tensor:
    """Places [c] of the targets among the ``rest`` tokens: evenly spaced from the first (``count`` <= ``rest``)."""
    return torch.arange(0, rest, max(1, rest // max(1, count)))[:count]


def contextual_tokens(tokens_RC: Tensor, keys_Rd: Tensor, targets_c: Tensor) -> Tensor:
    """Merge the rest into its targets, [c, C].

    Args:
        tokens_RC: the tokens that are not dominant.
        keys_Rd: their keys; similarity is the cosine.
        targets_c: places of the targets among them.
    """
    if not len(targets_c):
        return tokens_RC[:0]
    is_target = torch.zeros(len(tokens_RC), dtype=torch.bool, device=tokens_RC.device)
    is_target[targets_c] = True
    keys = F.normalize(keys_Rd.float(), dim=-1)
    with torch.autocast(keys.device.type, enabled=False):
        joined = (keys[~is_target] @ keys[is_target].T).argmax(-1)
    sums_cC = tokens_RC.new_zeros(len(targets_c), tokens_RC.shape[-1], dtype=torch.float32)
    sums_cC.index_add_(0, joined, tokens_RC[~is_target].float())
    members_c = torch.bincount(joined, minlength=len(targets_c)).clamp(min=1)
    return tokens_RC[is_target] + (sums_cC / members_c[:, None]).to(tokens_RC.dtype)
