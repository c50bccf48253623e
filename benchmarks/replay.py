"""Question-aware evictions whose loss is read by all that is scored: what they kept is kept again, before the question.

An eviction acts after the prompt's pass, so under ``query_aware`` the first token and the question's own rows come from
the whole cache. Here the prompt runs once to say what stays; then the context runs alone, the same entries stay of it,
and the question reads these, as under ``context_first``. So it is with FastV and Quest, which choose by the question
and let it read what was chosen. It costs a second pass, and is for comparisons at equal sight: no method serves so.

Legend: B batch, L layers, N positions of the prompts, M of their contexts, h key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from subtoken_train.cache.cache import PackedCache
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions.base import Eviction
from subtoken_train.functional.gather import kept_index, take_rows
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import context_part, open_prompts
from subtoken_train.types import Batch, LayerPlan, Region
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import View


@dataclass(frozen=True, eq=False)
class Replayed(Eviction):
    """Keeps what another method kept of the same context.

    Attributes:
        kept_LBhM: of every layer, bool [B, h, M], or [B, 1, M] where all heads share a set.
    """

    name: ClassVar[str] = "replayed"

    kept_LBhM: tuple[Tensor, ...]

    @property
    def across_layers(self) -> bool:
        """The sets are of all layers."""
        return True

    def score(self, view: View) -> Scores:
        """Nothing is asked of the attention."""
        return Scores(self.kept_LBhM[view.layer].float(), torch.zeros_like(view.entries_BN))

    def keep(self, scores: list[Scores], candidates: Candidates) -> list[Tensor]:
        """The sets, and the entries that do not compete."""
        others = [
            (regions_BM != Region.PADDING) & ~competes_BM
            for regions_BM, competes_BM in zip(candidates.regions_LBN, candidates.competes_LBN, strict=True)
        ]
        return [kept | other[:, None] for kept, other in zip(self.kept_LBhM, others, strict=True)]


@torch.no_grad()
def replayed(backbone: CompressedBackbone, prompts: Batch, compression: Compression) -> Compression:
    """The compression that keeps of the prompts' contexts, alone, what ``compression`` keeps of them with the question.

    Args:
        backbone: in evaluation mode, without a token reducer.
        prompts: a batch without answers.
        compression: with an eviction that frees what it does not keep.

    Raises:
        ValueError: as ``open_prompts``; or the eviction frees nothing.
    """
    method = compression.eviction
    assert method is not None
    assert not backbone.reducer.acts
    if method.reads:
        raise ValueError(f"eviction {method.name!r} evicts nothing, so that nothing can be kept again")
    cache = PackedCache(backbone.family.shape.num_layers)
    plan = open_prompts(backbone, prompts, cache, compression, "query_aware").plan
    index_BM, valid_BM = kept_index(context_part(prompts.regions_BN), pad_left=True)
    marks = [marked(layer, prompts.regions_BN.shape[1]) for layer in plan.layers]
    kept = tuple((take_rows(marks_BNh, index_BM) & valid_BM[..., None]).transpose(1, 2) for marks_BNh in marks)
    return replace(compression, eviction=Replayed(kept), keep=1.0, unit="fraction", merge=compression.merging)


def marked(layer: LayerPlan, positions: int) -> Tensor:
    """Which of the prompts' positions a plan keeps in a layer, bool [B, N, h]; h is 1 where all heads share a set."""
    valid_BN = layer.entries_BN >= 0
    heads_BNh = valid_BN[..., None] if layer.heads_BNh is None else layer.heads_BNh & valid_BN[..., None]
    places = layer.entries_BN.clamp(min=0)[..., None].expand(heads_BNh.shape)
    marks_BNh = heads_BNh.new_zeros(heads_BNh.shape[0], positions, heads_BNh.shape[2], dtype=torch.int32)
    return marks_BNh.scatter_add_(1, places, heads_BNh.int()) > 0
