"""Key channels of a prompt's cache: which ones stay, and of which entries (ThinK).

The queries of a prompt's last rows say which channels of each key-value head matter to what comes next, together with
the keys that stay after an eviction (``functional/key_channels.py``). Cut are the keys of the entries in scope; those
of the last rows, and everything outside of the scope, stay whole. Values are not touched.

Legend: B batch, N entries of a plan, M rows of a layer, h key-value heads, d head width.
"""

from __future__ import annotations

from torch import Tensor

from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.evictions.observers import last_marked
from subtoken_train.functional.gather import take_rows
from subtoken_train.functional.key_channels import best_channels, key_energy, query_energy
from subtoken_train.inference.compression import Compression
from subtoken_train.ledger.kv_budget import kept_channels
from subtoken_train.types import CutKeys, LayerPlan, Region


class KeyCut:
    """The observer of one prompt pass: notes the last queries layer after layer, then says what stays of the keys.

    Args:
        compression: whose ``key_channels`` stay.
    """

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self.energy: dict[int, Tensor] = {}
        self.regions: dict[int, Tensor] = {}

    def observe(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows) -> None:
        """Note a layer's last queries, see ``PromptObserver``."""
        self.regions[layer] = rows.regions_BM
        asks_BM = last_marked(rows.regions_BM != Region.PADDING, self.compression.key_window)
        self.energy[layer] = query_energy(query, asks_BM, key.shape[1])

    def cut(self, layer: int, plan: LayerPlan, key_BhMd: Tensor) -> None:
        """Write into a layer's plan which keys are cut, and to which channels; ``key_BhMd`` are its rotated keys."""
        rows_BN, valid_BN = plan.rows_BN, plan.entries_BN >= 0
        assert rows_BN is not None
        heads_BhN = valid_BN[:, None] if plan.heads_BNh is None else (plan.heads_BNh & valid_BN[..., None]).mT
        scores = self.energy[layer] * key_energy(key_BhMd, rows_BN, heads_BhN)
        channels = best_channels(scores, kept_channels(scores.shape[-1], self.compression.key_channels))
        cut_BM = self.compression.cuts_keys(self.regions[layer])
        plan.cut_keys = CutKeys(take_rows(cut_BM, rows_BN) & valid_BN, channels)
