"""What a step reads that chooses pages, by plain loops: for recomputes without a cache.

Legend: h key-value heads, H query heads, N rows, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.evictions.quest_steps import QuestSteps
from subtoken_train.inference.compression import Compression
from subtoken_train.types import Region


@dataclass
class PageTruth:
    """One layer of one sample.

    ``columns``: its entries in order; ``chosen_of``: those that compete; ``budget`` of these may be read.
    """

    columns: list[int]
    chosen_of: set[int]
    budget: int
    size: int
    least: int

    def pages(self) -> tuple[list[list[int]], list[bool], int]:
        """Whole pages, whether each is always read, and how many are."""
        parts = [self.columns[i : i + self.size] for i in range(0, len(self.columns), self.size)]
        left_over = parts.pop() if parts and len(parts[-1]) < self.size else []
        always = [any(column not in self.chosen_of for column in part) for part in parts]
        if not left_over and always:
            always[-1] = True
        forced = [column for part, stays in zip(parts, always, strict=True) if stays for column in part]
        spare = self.budget - len([column for column in [*forced, *left_over] if column in self.chosen_of])
        count = max(sum(always) + max(0, spare) // self.size, self.least - bool(left_over))
        return parts, always, min(count, len(parts))

    def hide_unread(self, allowed_hNN: Tensor, query_HNd: Tensor, key_hNd: Tensor, alone: int) -> None:
        """Hide from every row from ``alone`` on, which came by itself, the pages that each head does not choose."""
        parts, always, count = self.pages()
        group = len(query_HNd) // len(key_hNd)
        for head, keys in enumerate(key_hNd.float()):
            for row in range(alone, allowed_hNN.shape[1]):
                bounds = []
                for part, stays in zip(parts, always, strict=True):
                    low, high = keys[part].amin(0), keys[part].amax(0)
                    queries = query_HNd[head * group : (head + 1) * group, row].float()
                    bound = sum(float(torch.maximum(query * low, query * high).sum()) for query in queries) / group
                    bounds.append(float("inf") if stays else bound)
                order = sorted(range(len(parts)), key=lambda page, own=bounds: (-own[page], page))
                for page in order[count:]:
                    allowed_hNN[head, row, parts[page]] = False


def note_pages(saved: list, tap, compression: Compression) -> None:
    """Write into the truth of every sample what the steps read under ``QuestSteps``, with a share as the budget."""
    method, result, followed = compression.eviction, tap.result[-1], tap.batch[-1].followed
    assert isinstance(method, QuestSteps)
    first = result.spans[0][2] if result.spans else result.rows
    for sample, truth in enumerate(saved):
        regions = first.regions_BM[sample, first.visible_BM[sample]].tolist()
        for layer in truth.layers[method.dense_layers :]:
            columns = layer.entries_hN[0].nonzero()[:, 0].tolist()
            inside = [i for i in columns if compression.scope == "all" or regions[i] in (Region.VISUAL, Region.CONTEXT)]
            chosen_of = set(inside) - (set() if followed else {columns[-1]})
            budget = int(len(inside) * compression.keep + 1e-9) - (len(inside) - len(chosen_of))
            budget = min(max(1, budget), len(chosen_of))
            layer.pages = PageTruth(columns, chosen_of, budget, method.page_size, method.least_pages)
