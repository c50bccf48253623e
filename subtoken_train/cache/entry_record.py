"""What a packed layer must know of its entries to evict while tokens are decoded: which they are, and who asked last.

Entries are counted in the order of storage (``cache/entries.py``); a row is a sample, or a head of one where heads hold
entries of their own.

Legend: B batch, h key-value heads, H query heads, R rows, M stored entries (of the longest row), T tail tokens,
N = M + T, q new tokens, k statistics of a head, d head width.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from subtoken_train.functional.gather import kept_index
from subtoken_train.types import LayerPlan, Region

STAYS = 128
"""Added to the region of an entry that never competes."""


@dataclass
class EntryRecord:
    """Of one layer.

    Attributes:
        place_RM: number of each entry among all tokens that the layer has seen of its sample, from 0, int32; -1 pads.
        region_RM: its ``Region``, plus ``STAYS`` where it never competes, uint8.
        seen_B: tokens that the layer has seen of each sample, without the tail, int64.
        budget_B: competing entries that may stay, int64.
        observed: last query rows that are wanted; None: all since they were last read.
        carried_RkN: what the method noted of the entries and of the first tail tokens; None: nothing.
        given: first tokens of the tail that belong to the prompt; they never compete.
        queries: rotated queries of the last tokens, [B, H, q, d] each.
        held: rows of these.
    """

    place_RM: Tensor
    region_RM: Tensor
    seen_B: Tensor
    budget_B: Tensor
    observed: int | None
    carried_RkN: Tensor | None = None
    given: int = 0
    queries: deque[Tensor] = field(default_factory=deque)
    held: int = 0

    @classmethod
    def of_prompt(
        cls,
        plan: LayerPlan,
        regions_BM: Tensor,
        competes_BM: Tensor,
        budget_B: Tensor,
        observed: int | None,
        carried_BkM: Tensor | None,
    ) -> EntryRecord:
        """Of a layer as ``cache/pack.py`` packs it: routed entries first, of both kinds first those with cut keys.

        Args:
            plan: what was packed.
            regions_BM: of the rows of the prompt's pass.
            competes_BM: rows that compete.
            budget_B: see the class.
            observed: see the class.
            carried_BkM: the method's, [B, h * k, M].
        """
        valid_BN = plan.entries_BN >= 0
        rows_BN = (plan.entries_BN if plan.rows_BN is None else plan.rows_BN).clamp(min=0)
        whole_BN = torch.ones_like(valid_BN) if plan.group_mask_BNS is None else plan.group_mask_BNS.all(-1)
        cut_BN = torch.zeros_like(valid_BN) if plan.cut_keys is None else plan.cut_keys.entries_BN
        kind_BN, held_RN, heads = 2 * whole_BN + ~cut_BN, valid_BN, 1
        if plan.heads_BNh is not None:
            heads = plan.heads_BNh.shape[-1]
            held_RN = (plan.heads_BNh & valid_BN[..., None]).transpose(1, 2).flatten(0, 1)
            rows_BN, kind_BN = (x.repeat_interleave(heads, 0) for x in (rows_BN, kind_BN))
        kind_RN = torch.where(held_RN, kind_BN, 4)
        order_RN = kind_RN.sort(dim=-1, stable=True).indices[:, : int(held_RN.sum(-1).max())]
        row_RM, kept_RM = rows_BN.gather(1, order_RN), held_RN.gather(1, order_RN)
        entries_BM = regions_BM != Region.PADDING
        code_BM = regions_BM + STAYS * ~competes_BM
        place_RM, region_RM = (
            x.repeat_interleave(heads, 0).gather(1, row_RM) for x in (entries_BM.cumsum(-1) - 1, code_BM)
        )
        carried = None
        if carried_BkM is not None:
            by_row = carried_BkM.reshape(len(carried_BkM) * heads, -1, carried_BkM.shape[2])
            carried = by_row.gather(2, row_RM[:, None].expand(-1, by_row.shape[1], -1))
        return cls(
            place_RM.masked_fill(~kept_RM, -1).int(),
            region_RM.masked_fill(~kept_RM, Region.PADDING).to(torch.uint8),
            entries_BM.sum(-1),
            budget_B,
            observed,
            carried,
        )

    def copy(self) -> EntryRecord:
        """Another record of the same entries, which goes its own way."""
        return replace(self, queries=deque(self.queries))

    def note(self, query_BHqd: Tensor) -> None:
        """Keep the queries of new tokens, as long as they are wanted."""
        if self.observed == 0:
            return
        self.queries.append(query_BHqd)
        self.held += query_BHqd.shape[2]
        while self.observed is not None and self.held - self.queries[0].shape[2] >= self.observed:
            self.held -= self.queries.popleft().shape[2]

    def with_tail(self, tail: int, start_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """(places, regions with ``STAYS``) of all entries and of the tail's tokens, [R, N] each, int64.

        Args:
            tail: tokens of the tail.
            start_B: the first of each sample that is no padding; None: the very first.
        """
        places_T = torch.arange(tail, device=self.place_RM.device)
        start_B1 = torch.zeros_like(self.seen_B)[:, None] if start_B is None else start_B[:, None]
        region_T = torch.where(places_T < self.given, Region.QUERY + STAYS, int(Region.GENERATED))
        region_BT = torch.where(places_T < start_B1, int(Region.PADDING), region_T)
        place_BT = self.seen_B[:, None] + places_T - start_B1
        heads = len(self.place_RM) // len(self.seen_B)
        pairs = ((self.place_RM, place_BT), (self.region_RM, region_BT))
        place_RN, region_RN = (torch.cat([x.long(), y.repeat_interleave(heads, 0)], 1) for x, y in pairs)
        return place_RN, region_RN

    def carry(self, carried_RkN: Tensor | None) -> None:
        """Take what the method noted of all entries and the tail's tokens; the queries are read and let go."""
        self.carried_RkN = carried_RkN
        self.queries.clear()
        self.held = 0

    def carried(self, tail: int) -> Tensor | None:
        """What the method noted, 0 for the tail's tokens since, [R, k, N]."""
        if self.carried_RkN is None:
            return None
        return F.pad(self.carried_RkN, (0, self.place_RM.shape[1] + tail - self.carried_RkN.shape[2]))

    def keep(self, keep_RN: Tensor, tail: int, start_B: Tensor | None) -> None:
        """Keep the marked entries and tail tokens, which are stored in the order that they have."""
        index_RM, valid_RM = kept_index(keep_RN, pad_left=False)
        place_RN, region_RN = self.with_tail(tail, start_B)
        self.place_RM = place_RN.gather(1, index_RM).masked_fill(~valid_RM, -1).int()
        self.region_RM = region_RN.gather(1, index_RM).masked_fill(~valid_RM, Region.PADDING).to(torch.uint8)
        if self.carried_RkN is not None:
            assert self.carried_RkN.shape[2] == keep_RN.shape[1]
            self.carried_RkN = self.carried_RkN.gather(2, index_RM[:, None].expand(-1, self.carried_RkN.shape[1], -1))
        self.seen_B = self.seen_B + tail - (0 if start_B is None else start_B)
        self.given = 0

    def select(self, samples: Tensor) -> None:
        """Keep the samples, in that order."""
        heads = len(self.place_RM) // len(self.seen_B)
        rows_R = (samples[:, None] * heads + torch.arange(heads, device=samples.device)).flatten()
        stored, longest = self.place_RM.shape[1], int((self.place_RM[rows_R] >= 0).sum(-1).max())
        self.place_RM, self.region_RM = self.place_RM[rows_R, :longest], self.region_RM[rows_R, :longest]
        self.seen_B, self.budget_B = self.seen_B[samples], self.budget_B[samples]
        if self.carried_RkN is not None:
            chosen = self.carried_RkN[rows_R]
            self.carried_RkN = torch.cat([chosen[..., :longest], chosen[..., stored:]], -1)
        self.queries = deque(query[samples] for query in self.queries)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        parts = [self.place_RM, self.region_RM, self.seen_B, self.budget_B, *self.queries]
        return sum(part.nbytes for part in parts) + (0 if self.carried_RkN is None else self.carried_RkN.nbytes)
