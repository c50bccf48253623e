"""How well an eviction foresees what is read later: sparsity, hit rate and rank agreement, per layer.

What VL-Cache's figures show, for any method: the sparsity of a layer's attention in the prompt and while generating
(Figure 2), the share of the entries read most while generating that the method keeps (hit rate, Figure 3; the best
choice of the same size in the same head is the yardstick), and how much of what is read is image or context rather than
text (Figure 9). Beside them the share of the attention that its choice keeps, and Spearman's rank correlation between
its scores and the attention, over the entries that compete. Attention is that of generation with the whole cache
(``eviction_watch.py``), mean over the query heads of a key-value head, or of all where heads share a set.

Legend: B batch, N rows of a layer's cache, H query heads, h key-value heads (1 where all heads share), L layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.eviction_watch import WatchedEntries, watch_generation
from subtoken_train.evictions.base import keep_best_entries
from subtoken_train.evictions.observers import over_groups
from subtoken_train.inference.compression import Compression
from subtoken_train.types import Batch, Protocol


class PromptLayer(NamedTuple):
    """One layer of one prompt.

    Attributes:
        record: the prompt's name.
        layer: its index.
        entries: entries that compete.
        kept: of them, those that stay, mean over heads.
        sparsity: share of the prompt's attention weights below 1 % of their row's largest, in the rows that ask.
        generated_sparsity: the same of generated tokens; NaN where none was read.
        body_attention: of the attention that generated tokens pay to the prompt's entries, that to image or context.
        hit_rate: of as many entries as stay, those read most while generating: share that stays; NaN where none does.
        attention_kept: of the attention that generated tokens pay to what competes, that to what stays.
        rank_agreement: Spearman's, between scores and attention, mean over heads; NaN where either is constant.
    """

    record: str
    layer: int
    entries: int
    kept: float
    sparsity: float
    generated_sparsity: float
    body_attention: float
    hit_rate: float
    attention_kept: float
    rank_agreement: float


def diagnose_eviction(
    backbone: CompressedBackbone,
    batches: Iterable[Batch],
    compression: Compression,
    protocol: Protocol,
    new_tokens: int,
) -> list[PromptLayer]:
    """A row for every prompt and layer.

    Args:
        backbone: in evaluation mode.
        batches: of prompts; their size does not matter.
        compression: with an eviction.
        protocol: when the question is seen.
        new_tokens: that are generated at most, 1 or more.

    Raises:
        ValueError: the eviction does not fit the backbone or the prompts, or nothing is generated after any prompt.
    """
    rows = []
    for batch in batches:
        layers = watch_generation(backbone, batch, compression, protocol, new_tokens)
        for layer, watched in enumerate(layers):
            columns = [column.tolist() for column in layer_measures(watched)]
            rows += [PromptLayer(name, layer, *found) for name, *found in zip(batch.record_ids, *columns, strict=True)]
    if not any(row.generated_sparsity == row.generated_sparsity for row in rows):
        raise ValueError("nothing is generated after any of the prompts but end-of-text; choose other prompts")
    return rows


def layer_measures(watched: WatchedEntries) -> tuple[Tensor, ...]:
    """The columns of ``PromptLayer`` from ``entries`` on, [B] each."""
    competes_B1N, kept_BhN, scores_BhN = watched.competes_BN[:, None], watched.kept_BhN, watched.scores_BhN
    read_BhN = over_groups(watched.mass_BHN, kept_BhN.shape[1])
    count_Bh = kept_BhN.sum(-1)
    unprotected = torch.zeros_like(watched.competes_BN)
    best_BhN = keep_best_entries(read_BhN, watched.competes_BN, unprotected, count_Bh, least=0)
    read_B, counted_B = watched.mass_BHN.sum((1, 2)), watched.seen_B > 0
    body_B = (watched.mass_BHN * watched.body_BN[:, None]).sum((1, 2))
    measures = (
        (best_BhN & kept_BhN).sum((1, 2)) / count_Bh.sum(-1),
        (read_BhN * kept_BhN).sum((1, 2)) / (read_BhN * competes_B1N).sum((1, 2)),
        rank_agreement(scores_BhN, over_groups(watched.mass_BHN, scores_BhN.shape[1]), watched.competes_BN),
    )
    return (
        watched.competes_BN.sum(-1),
        count_Bh.double().mean(1),
        1 - watched.prompt_density_B,
        1 - watched.passed_B / watched.seen_B,
        body_B / read_B,
        *(measure.masked_fill(~counted_B, torch.nan) for measure in measures),
    )


def rank_agreement(first_BhN: Tensor, second_BhN: Tensor, among_BN: Tensor) -> Tensor:
    """Spearman's rank correlation over the marked places, mean over heads, fp64 [B]; ties share their mean rank.

    NaN where fewer than two places are marked, or a side is constant in every head.
    """
    found = []
    for first_hN, second_hN, among_N in zip(first_BhN, second_BhN, among_BN, strict=True):
        ranks = [torch.stack([_ranks(row_N[among_N]) for row_N in side]) for side in (first_hN, second_hN)]
        away = [side - side.mean(-1, keepdim=True) for side in ranks]
        product_h = (away[0] * away[1]).sum(-1)
        found.append((product_h / (away[0].norm(dim=-1) * away[1].norm(dim=-1))).nanmean())
    return torch.stack(found)


def _ranks(values_N: Tensor) -> Tensor:
    """Ranks from 0, fp64 [N]; equal values share the mean of theirs."""
    ordered_N = values_N.sort().values
    below_N, upto_N = (torch.searchsorted(ordered_N, values_N.contiguous(), right=right) for right in (False, True))
    return (below_N + upto_N - 1).double() / 2
