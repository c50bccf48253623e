"""What a packed layer holds for the fused kernels: its row table, and scratch that all layers of a cache share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from subtoken_train.kernels.fill import Fill
from subtoken_train.kernels.row_table import RowTable, row_table
from subtoken_train.kernels.storage import Block


@dataclass
class Workspace:
    """Scratch of the fused kernels, one piece a device; grows where a launch needs more, and stays."""

    held: dict[torch.device, Tensor] = field(default_factory=dict)

    def take(self, size: int, device: torch.device) -> Tensor:
        """``size`` numbers in fp32, whatever they were."""
        there = self.held.get(device)
        if there is None or len(there) < size:
            there = self.held[device] = torch.empty(size, dtype=torch.float32, device=device)
        return there[:size]

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(x.nbytes for x in self.held.values())


@dataclass
class FusedState:
    """Of one layer; the table is made when it is asked for, and forgotten when the layer's blocks change.

    Attributes:
        workspace: of the cache.
        table: None until a fused kernel reads the layer.
    """

    workspace: Workspace = field(default_factory=Workspace)
    table: RowTable | None = None

    def __getstate__(self) -> dict[str, object]:
        """Without the table: a copy's entries lie elsewhere."""
        return vars(self) | {"table": None}

    def table_of(
        self, blocks: Sequence[Block], batch: int, kv_heads: int, width: int, fill: Fill | None = None
    ) -> RowTable:
        """The layer's table; arguments as of ``row_table``."""
        if self.table is None:
            self.table = row_table(blocks, batch, kv_heads, width, fill)
        return self.table
