"""Rows of each sample: choosing the best or the last of a marked set, taking them, their mean.

Legend: B batch, N positions before, M positions after, D width; R rows of c heads, d head width, k channels of it.
"""

from array import array
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def rank_candidates(scores_BN: Tensor, candidates_BN: Tensor) -> Tensor:
    """Rank of each position by score, int64 [B, N]: 0 is the sample's best candidate; ties go to the lower index."""
    lowest = torch.finfo(torch.float32).min  # a candidate that scores -inf still comes before what is none
    scores = scores_BN.float().clamp(min=lowest).masked_fill(~candidates_BN, -torch.inf)
    return scores.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)


def keep_best(scores_BN: Tensor, candidates_BN: Tensor, count_B: Tensor) -> Tensor:
    """Mark the ``count_B`` best-scored candidates of each sample, bool [B, N]; ties go to the lower index."""
    return candidates_BN & (rank_candidates(scores_BN, candidates_BN) < count_B[:, None])


def kept_index(keep_BN: Tensor, pad_left: bool, longest: int | None = None) -> tuple[Tensor, Tensor]:
    """Turn a keep mask into gather indices [B, M] and which are valid: kept positions, ascending, padded with 0.

    ``longest``: the most that a sample keeps; None: it is read from the device.
    """
    count_B = keep_BN.sum(-1)
    longest = int(count_B.max()) if longest is None else longest
    order_BN = keep_BN.int().sort(dim=-1, descending=not pad_left, stable=True).indices
    slots_M = torch.arange(longest, device=keep_BN.device)
    if pad_left:
        index_BM = order_BN[:, order_BN.shape[1] - longest :]
        valid_BM = slots_M >= (longest - count_B)[:, None]
    else:
        index_BM = order_BN[:, :longest]
        valid_BM = slots_M < count_B[:, None]
    return index_BM.masked_fill(~valid_BM, 0), valid_BM


def take_rows(tensor: Tensor, index_BM: Tensor) -> Tensor:
    """Take rows ``index_BM`` of [B, N, ...] along the second axis, [B, M, ...]."""
    index = index_BM.reshape(*index_BM.shape, *[1] * (tensor.dim() - 2)).expand(-1, -1, *tensor.shape[2:])
    return tensor.gather(1, index)


def take_entries(vectors_RcNd: Tensor, index_RM: Tensor, channels_Rck: Tensor | None = None) -> Tensor:
    """Take entries of every head, [R, c, M, d], or [R, c, M, k] in chosen channels."""
    if len(index_RM) == 1:  # a call instead of four: a GPU waits for calls, not for bytes
        taken = vectors_RcNd.index_select(2, index_RM[0])
    else:
        rows, heads = (torch.arange(size, device=index_RM.device) for size in vectors_RcNd.shape[:2])
        taken = vectors_RcNd[rows[:, None, None], heads[:, None], index_RM[:, None]]  # gather takes twice as long
    if channels_Rck is None:
        return taken
    return taken.gather(3, channels_Rck.long()[:, :, None].expand(-1, -1, index_RM.shape[1], -1))


def count_positions(visible_BN: Tensor) -> Tensor:
    """Return position ids [B, N] that count real tokens only, whatever the padding side."""
    return (visible_BN.long().cumsum(-1) - 1).clamp(min=0)


def plain_product(first: Tensor, second: Tensor) -> Tensor:
    """Return ``first @ second`` in the tensors' own dtype, under any autocast."""
    with torch.autocast(first.device.type, enabled=False):
        return first @ second


def masked_mean(rows_BND: Tensor, mask_BN: Tensor) -> Tensor:
    """Average the marked rows, [B, D] in fp32 under any autocast; zeros where none is marked."""
    weight_BN = mask_BN.float()
    return plain_product(weight_BN[:, None], rows_BND.float()).squeeze(1) / weight_BN.sum(-1, keepdim=True).clamp(min=1)


def last_marked(marked_BN: Tensor, count_B1: Tensor | int) -> Tensor:
    """Mark the last ``count_B1`` of each sample's marked places, bool [B, N]; all of them where there are fewer."""
    return marked_BN & (marked_BN.flip(-1).cumsum(-1).flip(-1) <= count_B1)


def sent(numbers: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers, one at least, on a device; the host does not wait for the copy."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64).to(device, dtype, non_blocking=True)


def on_device(parts: T, device: torch.device) -> T:
    """Move tensors to a device: one, or those in a list, in the values of a dict, or in the fields of a dataclass."""
    return each_tensor(parts, lambda tensor: tensor.to(device))


def each_tensor(parts: T, take: Callable[[Tensor], Tensor]) -> T:
    """Return what ``take`` makes of tensors, one or those in a list, dict or dataclass; else ``parts`` itself."""
    changed: Any = parts
    if isinstance(parts, Tensor):
        changed = take(parts)
    elif isinstance(parts, list):
        each = [each_tensor(part, take) for part in parts]
        changed = parts if all(a is b for a, b in zip(each, parts, strict=True)) else each
    elif isinstance(parts, dict):
        by_name = {name: each_tensor(part, take) for name, part in parts.items()}
        changed = parts if all(by_name[name] is parts[name] for name in parts) else by_name
    elif is_dataclass(parts) and not isinstance(parts, type):
        own = {field.name: getattr(parts, field.name) for field in fields(parts) if field.init}
        new = {name: each_tensor(part, take) for name, part in own.items()}
        changed = parts if all(new[name] is own[name] for name in own) else replace(parts, **new)
    made: T = changed
    return made
