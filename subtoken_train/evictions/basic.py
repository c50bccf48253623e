"""Methods of a few lines: places, chance, key lengths and directions, the last row, the question's rows, all pages.

Legend: B batch, N cached rows of the prompt, H query heads, h key-value heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import competing_counts
from subtoken_train.evictions.observers import column_sums, over_groups, task_rows
from subtoken_train.functional.gather import last_marked
from subtoken_train.functional.hashing import uniform_hash
from subtoken_train.types import Region
from subtoken_train.view.method import setting
from subtoken_train.view.scores import Candidates, Scale, Scores
from subtoken_train.view.view import Need, Online, View


@dataclass(frozen=True)
class StreamingLLM(Eviction):
    """StreamingLLM (Xiao et al., 2024): the first few entries and the most recent ones, whatever they hold.

    Source: sections 3.1-3.2 of "Efficient Streaming Language Models with Attention Sinks" and its code, which turns
    keys to closed-up positions: ``rerotate: true`` here. While tokens are decoded the window moves on
    (``eviction_every``). Sinks are the first entries of the whole prompt, recent ones the last of what competes.
    KVCache-Factory's class of that name fixes the window: ``sinks`` = capacity - window.

    Attributes:
        sinks: first entries that always stay, inside the budget; a budget no larger leaves only sinks, the latest.
    """

    name: ClassVar[str] = "streaming_llm"
    online: ClassVar[Online] = Online(rows=0)
    heads_share: ClassVar[bool] = True

    sinks: int = setting(4)

    def score(self, view: View) -> Scores:
        place_BN = view.entries_BN.cumsum(-1)
        return Scores(place_BN[:, None].float(), view.entries_BN & (place_BN <= self.sinks))


@dataclass(frozen=True)
class RandomEviction(Eviction):
    """Control: entries at random, in every layer and head anew.

    Scores are a hash of (seed, layer, head, place among the sample's entries), the same in every run and any batch; two
    prompts of the same length keep the same places.

    Attributes:
        seed: which random choice.
    """

    name: ClassVar[str] = "random"
    absolute: ClassVar[Scale] = Scale(low=0.0, high=1.0)

    seed: int = 0

    def score(self, view: View) -> Scores:
        place_BN = view.entries_BN.cumsum(-1)
        heads_h1 = torch.arange(view.key_BhNd.shape[1], device=place_BN.device)[:, None]
        scores_BhN = uniform_hash(heads_h1, place_BN[:, None], view.layer, self.seed)
        return Scores(scores_BhN, view.entries_BN.new_zeros(view.entries_BN.shape))


@dataclass(frozen=True)
class KNorm(Eviction):
    """Key norm (Devoto et al., 2024): entries whose keys are short stay.

    Source: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression". Nothing is protected, no query is
    read, all layers have the same budget (the paper leaves the first layers whole), nothing is evicted while decoding.
    """

    name: ClassVar[str] = "knorm"
    needs: ClassVar[frozenset[Need]] = frozenset({"key_norms"})

    def score(self, view: View) -> Scores:
        return Scores(-view.key_norms(), view.entries_BN.new_zeros(view.entries_BN.shape))


SHORTEST = 1e-12  # length that a vector has at least where it is divided by its length


@dataclass(frozen=True)
class KeyDiff(Eviction):
    """KeyDiff (Park et al., 2025): entries whose keys are unlike the prompt's average key stay.

    Source: "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
    Environments" (2504.15364), in the form of kvpress 0.5.4: minus the cosine similarity of an entry's rotated key to
    the mean of all normalised keys. The prompt is read whole (the paper evicts in blocks); nothing is protected, all
    layers have the same budget, nothing is evicted while decoding.
    """

    name: ClassVar[str] = "keydiff"
    absolute: ClassVar[Scale] = Scale(low=-1.0, high=1.0)

    def score(self, view: View) -> Scores:
        return Scores(-anchor_similarity(view.key_BhNd, view.entries_BN), torch.zeros_like(view.entries_BN))


def anchor_similarity(key_BhNd: Tensor, entries_BN: Tensor) -> Tensor:
    """Cosine similarity of every key to the mean of the entries' normalised keys, [B, h, N] in fp32."""
    key_BhNd = key_BhNd.float()
    share_BhN = 1 / key_BhNd.norm(dim=-1).clamp(min=SHORTEST)
    weight_BhN = share_BhN * entries_BN[:, None]  # the anchor's own length divides out
    anchor_Bhd1 = (weight_BhN[:, :, None] @ key_BhNd).transpose(-1, -2)
    length_Bh11 = anchor_Bhd1.norm(dim=-2, keepdim=True).clamp(min=SHORTEST)
    similarity_BhN: Tensor = (key_BhNd @ (anchor_Bhd1 / length_Bh11))[..., 0] * share_BhN
    return similarity_BhN


@dataclass(frozen=True)
class TOVA(Eviction):
    """TOVA (Oren et al., 2024): the entries that the prompt's last row attends to, one set for all heads of a layer.

    Source: "Transformers are Multi-State RNNs" (2401.06104) and its code (``tova_cache.py`` @9c7d09b): attention of the
    last row, mean over all query heads. The paper evicts at every step while decoding, here after ``eviction_every``
    tokens, by the last one's row. The last row is the question's, or without a question the context's own.

    Attributes:
        protect_last: the prompt's last entry always stays, inside the budget (kvpress).
    """

    name: ClassVar[str] = "tova"
    absolute: ClassVar[Scale] = Scale(log=True, high=0.0)
    online: ClassVar[Online] = Online(rows=1)
    needs: ClassVar[frozenset[Need]] = frozenset({"rows"})
    heads_share: ClassVar[bool] = True

    protect_last: bool = False

    def score(self, view: View) -> Scores:
        scores_B1N = view.rows(view.last_rows(1))[:, :, 0].mean(1, keepdim=True)
        last_BN = last_marked(view.entries_BN, 1) if self.protect_last else torch.zeros_like(view.entries_BN)
        return Scores(scores_B1N, last_BN)


@dataclass(frozen=True)
class Finch(Eviction):
    """Finch (Corallo & Papotti, 2024): entries that the question attends to, its rows weighted by what they could see.

    Source: "FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models" (2408.00167), its code and
    kvpress 0.5.4. The score is the attention of the question's rows, each times the number of entries up to it, mean
    over rows and a group's query heads. The question's entries stay; prompts without one, and contexts compressed
    before their question, are refused.

    A set per key-value head, as in kvpress (one for all heads in the paper). Both turn what stays to closed-up
    positions: ``rerotate: true`` here. The context is read whole; nothing is evicted while decoding.

    Attributes:
        normalise: weight every row by the number of entries up to it.
    """

    name: ClassVar[str] = "finch"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks"})
    needs_question: ClassVar[bool] = True

    normalise: bool = True

    def score(self, view: View) -> Scores:
        asking_BN = task_rows(view.regions_BN)
        weight_BN = view.entries_BN.cumsum(-1).float() if self.normalise else None
        sums_BHN = column_sums(view.blocks(asking_BN), weight_BN) / asking_BN.sum(-1).clamp(min=1)[:, None, None]
        scores_BhN = over_groups(sums_BHN, view.key_BhNd.shape[1])
        return Scores(scores_BhN.masked_fill(asking_BN[:, None], 0.0), asking_BN)


@dataclass(frozen=True)
class QuestSteps(Eviction):
    """Quest as published: all entries stay in memory, and every decoding step reads the pages that its query asks for.

    Source: "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (Tang et al., 2024), sections
    3.2-3.4, and its code. The smallest and largest value of each key channel in a page bound the logits of its entries;
    the pages with the largest bounds are read, in the first layers everything.

    **No bytes are freed**: ``eviction_keep`` is the share (or number) of the entries in scope that a step reads, tables
    say ``reads``, and the page index comes on top of the full cache. The reducer ``quest`` chooses pages once and drops
    the others. Pages are chosen per key-value head, by the mean of its query heads' bounds. Pages that hold an entry
    out of scope, the last page and what was generated since are always read; the budget is rounded down to pages;
    tokens that are not decoded one by one read everything. It does not go with value groups.

    Attributes:
        page_size: entries of a page.
        least_pages: pages that a step reads, whatever the budget.
        dense_layers: first layers that read everything.
    """

    name: ClassVar[str] = "quest_steps"
    heads_share: ClassVar[bool] = True
    reads: ClassVar[bool] = True

    page_size: int = setting(16, 1)
    least_pages: int = setting(3, 1)
    dense_layers: int = setting(2)

    def score(self, view: View) -> Scores:
        return Scores(torch.zeros_like(view.entries_BN[:, None], dtype=torch.float32), view.entries_BN)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        return competing_counts(candidates)

    def keep(self, scores: list[Scores], candidates: Candidates) -> list[Tensor]:
        return [(regions_BN != Region.PADDING)[:, None] for regions_BN in candidates.regions_LBN]

    def pages(self, layer: int) -> tuple[int, int] | None:
        return None if layer < self.dense_layers else (self.page_size, self.least_pages)
