"""Merging of entries that are dropped into entries that stay: every head for itself, means of what was joined.

``position`` (Elastic Cache, Liu et al., 2024): a dropped entry goes to the nearest one that stays; a plain mean.
``average``, ``weighted`` and ``pivot`` (LOOK-M, Wan et al., 2024; the latter two as ``merge_kv`` of
Zefan-Cai/KVCache-Factory): to the one whose key is most like its own, by cosine c; a plain mean; with weights 1 for who
stays and (1 + c) / 2 for who joins; the mean of the entry and of the midpoints between it and each that joins.

Legend: B batch, N cached rows of the prompt, h key-value heads (1: one set for all heads), d head width, R = B h rows,
K kept entries, W dropped entries of a block.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from subtoken_train.functional import causal_attention
from subtoken_train.functional.gather import kept_index, plain_product, take_rows

Merge = Literal["none", "average", "weighted", "pivot", "position"]
PAIRS = 2**25  # similarities that exist at a time


def merged(
    kind: Merge, key_BhNd: Tensor, value_BhNd: Tensor, keep_BhN: Tensor, entries_BN: Tensor, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Merge a layer's dropped entries into kept ones, ``most`` of a head; keys and values after it, [B, h, N, d]."""
    if kind == "none":
        return key_BhNd, value_BhNd
    weight_BhN = None
    if kind == "position":
        target_BhN = nearest_anchor(keep_BhN, entries_BN)
    else:
        keep_BhN = keep_BhN.expand(key_BhNd.shape[:3])
        dropped_BhN = entries_BN[:, None] & ~keep_BhN
        target_BhN, cosine_BhN = nearest_key(key_BhNd, keep_BhN, dropped_BhN, most)
        if kind == "weighted":
            weight_BhN = torch.where(dropped_BhN, (1 + cosine_BhN) / 2, 1.0)
        elif kind == "pivot":
            halves_BhN = dropped_BhN / 2
            weight_BhN = torch.where(dropped_BhN, halves_BhN, 1 + halves_BhN.scatter_add(2, target_BhN, halves_BhN))
    return joined_means(key_BhNd, target_BhN, weight_BhN), joined_means(value_BhNd, target_BhN, weight_BhN)


def nearest_key(key_BhNd: Tensor, kept_BhN: Tensor, dropped_BhN: Tensor, most: int | None) -> tuple[Tensor, Tensor]:
    """Find for every dropped row the kept one of its head whose key is most like its own, and the cosine, [B, h, N]."""
    shape, length = kept_BhN.shape, kept_BhN.shape[2]
    unit_RNd = functional.normalize(key_BhNd.flatten(0, 1).float(), dim=-1)
    read = most is None or key_BhNd.device.type not in causal_attention.DEVICES
    kept_RK, stays_RK = kept_index(kept_BhN.flatten(0, 1), False, None if read else most)
    going_RW, goes_RW = kept_index(dropped_BhN.flatten(0, 1), False, None if read else length)
    target_RN = torch.arange(length + 1, device=key_BhNd.device).repeat(len(unit_RNd), 1)  # the last is no row
    cosine_RN = torch.zeros(target_RN.shape, device=key_BhNd.device)
    if not kept_RK.shape[1]:
        return target_RN[:, :-1].reshape(shape), cosine_RN[:, :-1].reshape(shape)
    anchors_RKd, step = take_rows(unit_RNd, kept_RK), max(1, PAIRS // kept_RK.numel())
    goes_RW = goes_RW & stays_RK[:, :1]
    for start in range(0, going_RW.shape[1], step):
        rows_RW, there_RW = (x[:, start : start + step] for x in (going_RW, goes_RW))
        like_RWK = plain_product(take_rows(unit_RNd, rows_RW), anchors_RKd.mT)
        best_RW, place_RW = like_RWK.masked_fill(~stays_RK[:, None], -torch.inf).max(-1)
        rows_RW = rows_RW.where(there_RW, length)
        target_RN.scatter_(1, rows_RW, kept_RK.gather(1, place_RW))
        cosine_RN.scatter_(1, rows_RW, best_RW)
    return target_RN[:, :-1].reshape(shape), cosine_RN[:, :-1].reshape(shape)


def nearest_anchor(anchors_BhN: Tensor, entries_BN: Tensor) -> Tensor:
    """Find the anchor's row that is nearest to every row, in entries, int64 [B, h, N]; ties go to the earlier anchor.

    Rows that are no entries, and all rows of a head without an anchor (``anchors_BhN``, bool), go to themselves.
    """
    length = entries_BN.shape[-1]
    rows_N = torch.arange(length, device=entries_BN.device)
    anchors_BhN = anchors_BhN & entries_BN[:, None]
    before_BhN = torch.where(anchors_BhN, rows_N, -1).cummax(-1).values
    after_BhN = torch.where(anchors_BhN, rows_N, length).flip(-1).cummin(-1).values.flip(-1)
    place_BhN = entries_BN.cumsum(-1)[:, None].expand_as(anchors_BhN)
    far = 2 * length  # farther than any anchor
    back_BhN = (place_BhN - place_BhN.gather(-1, before_BhN.clamp(min=0))).masked_fill(before_BhN < 0, far)
    there_BhN = place_BhN.gather(-1, after_BhN.clamp(max=length - 1))
    ahead_BhN = (there_BhN - place_BhN).masked_fill(after_BhN == length, far)
    nearest_BhN = torch.where(back_BhN <= ahead_BhN, before_BhN, after_BhN)
    return torch.where(~entries_BN[:, None] | ((back_BhN == far) & (ahead_BhN == far)), rows_N, nearest_BhN)


def joined_means(states_BhNd: Tensor, target_BhN: Tensor, weight_BhN: Tensor | None = None) -> Tensor:
    """Average, in fp32, the rows that go to every row, [B, h, N, d]; one that none goes to stays as it is."""
    target_BhN = target_BhN.expand(states_BhNd.shape[:3])
    index = target_BhN[..., None].expand_as(states_BhNd)
    sums = torch.zeros(states_BhNd.shape, dtype=torch.float32, device=states_BhNd.device)
    weight_BhN = torch.ones(target_BhN.shape, device=sums.device) if weight_BhN is None else weight_BhN
    sums = sums.scatter_add(2, index, states_BhNd.float() * weight_BhN[..., None])
    total_BhN = torch.zeros_like(weight_BhN).scatter_add(2, target_BhN, weight_BhN)
    joined = (sums / total_BhN.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).to(states_BhNd.dtype)
    return torch.where((total_BhN > 0)[..., None], joined, states_BhNd)
