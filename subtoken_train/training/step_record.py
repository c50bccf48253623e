"""What the panels may read of the last micro-batch. Nothing is read from the device to make it.

Legend: B batch, N positions before the reducer, M positions after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.engine.prompt_pass import PromptPass, Rows
from subtoken_train.routing.state import RoutingState
from subtoken_train.types import Batch, Region, in_compressed_region


@dataclass(frozen=True)
class StepRecord:
    """The rows of a pass and what its routers did; not its activations.

    Attributes:
        regions_BN: ``Region`` codes of the unreduced batch.
        rows: the rows of the last layer.
        spans: (first layer, last layer + 1, rows) of each stretch of layers that ran on the same rows.
        state: what the routers did; None without routing.
        kept: under a context reducer, per layer the rows that later rows see, bool [B, M].
    """

    regions_BN: Tensor
    rows: Rows
    spans: list[tuple[int, int, Rows]]
    state: RoutingState | None
    kept: dict[int, Tensor]

    @classmethod
    def of(cls, batch: Batch, result: PromptPass) -> StepRecord:
        """The record of a pass over ``batch``."""
        return cls(batch.regions_BN, result.rows, result.spans, result.state, result.kept)

    def lengths_before(self) -> Tensor:
        """Tokens of each sample before the reducer, int64 [B]."""
        return (self.regions_BN != Region.PADDING).sum(-1)

    def visual(self) -> tuple[Tensor, Tensor]:
        """Visual tokens of the batch before and after the reducer, int64 scalars."""
        return (self.regions_BN == Region.VISUAL).sum(), (self.rows.regions_BM == Region.VISUAL).sum()

    def compressed(self) -> tuple[Tensor, Tensor]:
        """Entries of the compressed region before and after the reducer, summed over all layers: int64 scalars."""
        num_layers = self.spans[-1][1]
        before = in_compressed_region(self.regions_BN).sum() * num_layers
        return before, torch.stack([self.routed(layer).sum() for layer in range(num_layers)]).sum()

    def routed(self, layer: int) -> Tensor:
        """Tokens that a layer's routers chose groups for, bool [B, M] of the layer's rows."""
        rows = next(rows for start, stop, rows in self.spans if start <= layer < stop)
        routed_BM = in_compressed_region(rows.regions_BM)
        return routed_BM & self.kept[layer] if layer in self.kept else routed_BM
