"""What a prompt leaves in a packed layer: blocks of entries, what the fused kernels make of them, their bytes."""

from __future__ import annotations

from transformers.cache_utils import CacheLayerMixin

from subtoken_train.kernels.choice import choose_kernel
from subtoken_train.kernels.fill import Fill
from subtoken_train.kernels.fused_state import FusedState, Workspace
from subtoken_train.kernels.row_table import unserved
from subtoken_train.kernels.storage import Block


class StoredPrompt(CacheLayerMixin):  # type: ignore[misc]
    """Blocks of a prompt's entries; ``workspace`` is the scratch of the cache that the layer belongs to.

    Attributes:
        filler: what pieces that are not stored read as; None: zero. Set before the blocks that it belongs to.
    """

    def __init__(self, workspace: Workspace | None = None) -> None:
        super().__init__()
        self.fused = FusedState(workspace or Workspace())
        self.filler: Fill | None = None
        self.blocks = []

    @property
    def blocks(self) -> list[Block]:
        """The prompt's entries; set anew, never changed in place."""
        return self._blocks

    @blocks.setter
    def blocks(self, blocks: list[Block]) -> None:
        """What was made of the earlier ones is forgotten."""
        self._blocks, self.fused.table = blocks, None

    def prepare(self) -> None:
        """Make what the fused kernels need of the entries, so that no step does; nothing where others run."""
        if choose_kernel(self.device.type).path == "triton" and unserved(self.blocks, self.keys) is None:
            batch, kv_heads, _, width = self.keys.shape
            self.fused.table_of(self.blocks, batch, kv_heads, width, self.filler)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the prompt's keys and values, and of what pieces that are not stored read as."""
        return sum(payload.nbytes for block in self.blocks for payload in block.payloads) + self.fill_bytes

    @property
    def fill_bytes(self) -> int:
        """Of them, those of what pieces that are not stored read as: as many for each sample."""
        return 0 if self.filler is None else self.filler.nbytes

    @property
    def index_bytes(self) -> int:
        """Bytes of what finds the stored pieces, and of the blocks' row numbers."""
        return sum(block.index_bytes for block in self.blocks)

    @property
    def unread_bytes(self) -> int:
        """Bytes of the prompt that one new token does not read: 0 unless pages are chosen in every step."""
        return sum(block.unread_bytes for block in self.blocks)
