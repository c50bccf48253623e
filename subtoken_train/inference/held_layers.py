"""A packed layer's entries and tail as an eviction method sees them while tokens are decoded (``OnlineView``).

Legend: B batch, h key-value heads, H query heads, R rows (B, or B * h where heads hold entries of their own), c key
heads of a row, M stored entries, T tail tokens, N = M + T, k statistics of a head, n query rows, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from subtoken_train.cache.entries import read_keys, read_values
from subtoken_train.cache.entry_record import STAYS, EntryRecord
from subtoken_train.cache.packed_layer import PackedLayer
from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.online_views import OnlineView
from subtoken_train.types import Region


@dataclass
class HeldLayer:
    """A layer's entries by row, oldest first, then its tail; padding between them where a row stores fewer than others.

    Attributes:
        layer: the layer.
        order_RM: where in the order of storage each of the stored entries is.
        place_RN: see ``EntryRecord``.
        regions_RN: ``Region`` codes; padding is no entry.
        competes_RN: entries that compete, bool.
    """

    layer: PackedLayer
    record: EntryRecord
    order_RM: Tensor
    place_RN: Tensor
    regions_RN: Tensor
    competes_RN: Tensor

    @classmethod
    def of(cls, layer: PackedLayer) -> HeldLayer:
        """Of a layer with a record."""
        record = layer.record
        assert record is not None
        place_RN, code_RN = record.with_tail(layer.tail_length, layer.tail_start_B)
        stored_RM = place_RN[:, : record.place_RM.shape[1]]
        order_RM = stored_RM.masked_fill(stored_RM < 0, torch.iinfo(torch.int64).max).sort(dim=-1, stable=True).indices
        place_RN, code_RN = _arranged(place_RN, order_RM), _arranged(code_RN, order_RM)
        regions_RN = code_RN % STAYS
        return cls(layer, record, order_RM, place_RN, regions_RN, (regions_RN != Region.PADDING) & (code_RN < STAYS))

    @property
    def heads(self) -> int:
        """Rows of a sample."""
        return len(self.place_RN) // len(self.record.seen_B)

    def budget(self) -> Tensor:
        """Competing entries that may stay of each row, int64 [R]."""
        return self.record.budget_B.repeat_interleave(self.heads)

    def needs(self) -> Tensor:
        """Samples with more competing entries than may stay, bool [B]."""
        return (self.competes_RN.sum(-1) > self.budget()).view(-1, self.heads).any(-1)

    def view(self, number: int, scale: float, method: Eviction) -> OnlineView:
        """The layer as its method sees it, read back for the purpose."""
        record, tail = self.record, self.layer.tail_rows()
        rows, tail_length = len(self.place_RN), tail.entries
        keys = self._dense(read_keys(self.layer.blocks, rows), tail.keys.read())
        values = keys[:, :, :0]  # the view gives them to nobody
        if OnlineView.reads_values(method.needs):
            values = self._dense(read_values(self.layer.blocks, rows, self.layer.filler), tail.payloads[1].read())
        carried = record.carried(tail_length)
        return OnlineView(
            number,
            self._queries(keys),
            keys,
            values,
            self.regions_RN,
            scale,
            method.needs,
            self.competes_RN,
            carried=None if carried is None else _arranged(carried, self.order_RM),
            budget=self.budget,
            place_RN=self.place_RN,
            seen_R=self.place_RN.amax(-1) + 1,
            heads=self.heads,
        )

    def _dense(self, stored_RcMd: Tensor, tail_RcTd: Tensor) -> Tensor:
        index = self.order_RM[:, None, :, None].expand(-1, stored_RcMd.shape[1], -1, stored_RcMd.shape[-1])
        return torch.cat([stored_RcMd.gather(2, index), tail_RcTd.to(stored_RcMd.dtype)], 2)

    def _queries(self, keys_RcNd: Tensor) -> Tensor:
        if not self.record.queries:
            return keys_RcNd[:, :, :0]
        query_BHnd = torch.cat(list(self.record.queries), 2)
        if self.record.observed is not None:
            query_BHnd = query_BHnd[:, :, -self.record.observed :]
        return query_BHnd.reshape(len(self.place_RN), -1, *query_BHnd.shape[2:])

    def carry(self, carried_RkN: Tensor | None) -> None:
        """Note what the method said of the entries of its view."""
        self.record.carry(None if carried_RkN is None else _arranged(carried_RkN, self.order_RM.argsort(-1)))

    def keep(self, keep_RN: Tensor, settles_B: Tensor, bits: int) -> None:
        """Keep the marked entries of the view."""
        self.layer.keep(_arranged(keep_RN, self.order_RM.argsort(-1)), settles_B, bits)


def _arranged(of_entries: Tensor, order_RM: Tensor) -> Tensor:
    """What is said of entries, [R, N] or [R, k, N], with the first M in another order."""
    stored = order_RM.shape[1]
    order = order_RM if of_entries.dim() == 2 else order_RM[:, None].expand(-1, of_entries.shape[1], -1)
    return torch.cat([of_entries[..., :stored].gather(-1, order), of_entries[..., stored:]], -1)
