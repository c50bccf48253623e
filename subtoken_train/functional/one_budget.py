"""One byte budget for keys and value groups (ours): what is worth most per byte stays.

A key costs its bytes, and each group kept with it its own; a logit is the logarithm of a worth, and worths add up. An
entry's first offer is its key with the groups (in the order of their logits) that make worth per byte highest; every
further group is an offer of its own. Offers are taken from the highest worth per byte down, until one does not fit;
what is left buys further groups of entries that stay. Ties go to the lower index: entry, then head, then group.

Legend: B samples, h key-value heads (of a layer, or of all layers), N entries, s groups of a head's value; R pools, M
entries of a pool, i offers of an entry.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from subtoken_train.types import EntryCosts

_EXTREME = 1e30  # logits beyond it are taken for it, so that differences are numbers
_DIGITS = 10**9  # decimals of a share that count; what is behind them would overflow 64 bits, and is left out


def budget_bytes(count_B: Tensor, entry_bytes: int, share: Fraction) -> Tensor:
    """Return the whole bytes that a share (its first nine decimals) of ``count_B`` entries leaves, int64."""
    return count_B * entry_bytes * int(share * _DIGITS) // _DIGITS


def best_in_bytes(
    key_BhN: Tensor,
    groups_BhNs: Tensor,
    competes_BhN: Tensor,
    always_BhN: Tensor,
    costs: EntryCosts,
    budget: Tensor,
    pooled: bool,
) -> tuple[Tensor, Tensor]:
    """Choose keys, bool [B, h, N], and value groups, bool [B, h, N, s], of each sample within its bytes.

    ``competes_BhN``: entries that may stay, bool; ``always_BhN``: of these, those that stay whole, before all others;
    [B, 1, N] where all heads have the same. Heads share one pool of ``budget`` bytes, int64 [B], if ``pooled``; else
    each has as many, or its own, [B, h].
    """
    batch, heads, length = key_BhN.shape
    if not length:
        return torch.zeros_like(key_BhN, dtype=torch.bool), torch.zeros_like(groups_BhNs, dtype=torch.bool)

    def by_pool(of_heads: Tensor) -> Tensor:
        return of_heads.transpose(1, 2).flatten(1, 2) if pooled else of_heads.flatten(0, 1)

    competes_RM, always_RM = (by_pool(marks.expand(-1, heads, -1)) for marks in (competes_BhN, always_BhN))
    budget_R = budget.reshape(batch, -1).expand(-1, 1 if pooled else heads).flatten()
    kept_RM, groups_RMs = _spent(by_pool(key_BhN), by_pool(groups_BhNs), competes_RM, always_RM, costs, budget_R)
    if pooled:
        return kept_RM.reshape(batch, length, heads).mT, groups_RMs.reshape(batch, length, heads, -1).transpose(1, 2)
    return kept_RM.reshape(batch, heads, length), groups_RMs.reshape(batch, heads, length, -1)


def cut_logit(
    key_BhN: Tensor, groups_BhNs: Tensor, chosen_BhN: Tensor, kept_BhNs: Tensor, costs: EntryCosts, pooled: bool
) -> Tensor:
    """Return the logit of a group worth its bytes as little as the least of the chosen entries, fp32 [B, h]; else 0."""
    kept_BhNi = torch.cat([chosen_BhN[..., None], kept_BhNs & chosen_BhN[..., None]], -1)
    logits_BhNi = torch.cat([key_BhN[..., None], groups_BhNs], -1).float().masked_fill(~kept_BhNi, -torch.inf)
    bytes_BhN = costs.key + kept_BhNs.sum(-1) * costs.group
    density_BhN = (logits_BhNi.logsumexp(-1) - bytes_BhN.log()).masked_fill(~chosen_BhN, torch.inf)
    least_Bh = torch.nn.functional.pad(density_BhN, (0, 1), value=torch.inf).amin(-1)
    if pooled:
        least_Bh = least_Bh.amin(-1, keepdim=True).expand(key_BhN.shape[:2])
    return torch.where(least_Bh.isfinite(), least_Bh + math.log(costs.group), 0.0)


def _spent(
    key_RM: Tensor, groups_RMs: Tensor, competes_RM: Tensor, always_RM: Tensor, costs: EntryCosts, budget_R: Tensor
) -> tuple[Tensor, Tensor]:
    pools, size, number = groups_RMs.shape
    order_RMs = groups_RMs.float().sort(dim=-1, descending=True, stable=True).indices
    sorted_RMs = groups_RMs.gather(-1, order_RMs)
    density_RMi, offered_RMi, first_RM = _offers(key_RM, sorted_RMs, competes_RM, always_RM, costs)
    cost_RMi = torch.full_like(density_RMi, costs.group, dtype=torch.long)
    cost_RMi[..., 0] = costs.key + first_RM * costs.group
    order = density_RMi.masked_fill(~offered_RMi, -1.0).flatten(1).sort(dim=-1, descending=True, stable=True).indices
    offered, cost = (x.flatten(1).gather(1, order) for x in (offered_RMi, cost_RMi))
    taken = offered & ((cost * offered).cumsum(-1) <= budget_R[:, None])
    left_R = budget_R - (cost * taken).sum(-1)

    def by_entry(marks: Tensor) -> Tensor:
        return torch.zeros_like(marks).scatter_(1, order, marks).reshape(pools, size, number + 1)

    taken_RMi = by_entry(taken)
    more = (offered_RMi & ~taken_RMi & taken_RMi[..., :1]).flatten(1).gather(1, order)
    more = more & (more.cumsum(-1) <= (left_R // costs.group)[:, None])
    taken_RMi = taken_RMi | by_entry(more)
    count_RM = torch.where(taken_RMi[..., 0], first_RM, 0) + taken_RMi[..., 1:].sum(-1)
    wanted_RMs = torch.arange(number, device=order.device) < count_RM[..., None]
    return taken_RMi[..., 0], torch.zeros_like(wanted_RMs).scatter_(-1, order_RMs, wanted_RMs)


def _offers(
    key_RM: Tensor, sorted_RMs: Tensor, competes_RM: Tensor, always_RM: Tensor, costs: EntryCosts
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each entry's offers: worth per byte, whether there is one, [R, M, 1 + s]; the first one's groups."""
    logits_RMi = torch.cat([key_RM[..., None], sorted_RMs], -1).float().clamp(-_EXTREME, _EXTREME)
    highest_R = logits_RMi.masked_fill(~competes_RM[..., None], -_EXTREME).flatten(1).amax(-1)
    worth_RMi = (logits_RMi - highest_R[:, None, None]).clamp(max=0).exp()  # only ratios count
    places_i = torch.arange(logits_RMi.shape[-1], device=key_RM.device)
    prefix_RMi = worth_RMi.cumsum(-1) / (costs.key + places_i * costs.group)
    best_RM1 = prefix_RMi.amax(-1, keepdim=True)
    first_RM = (prefix_RMi < best_RM1).cumprod(-1).sum(-1)  # the fewest groups of those with the highest
    first_RM = torch.where(always_RM, sorted_RMs.shape[-1], first_RM)
    best_RM1 = best_RM1.masked_fill(always_RM[..., None], torch.inf)
    # rounding must not put a group before the key that it comes with
    later_RMs = torch.minimum(worth_RMi[..., 1:] / costs.group, best_RM1)
    offered_RMi = competes_RM[..., None] & ((places_i == 0) | (places_i > first_RM[..., None]))
    return torch.cat([best_RM1, later_RMs], -1), offered_RMi, first_RM
