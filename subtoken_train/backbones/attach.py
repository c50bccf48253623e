"""A backbone with a token reducer and value-group routers: the one path of training, evaluation and generation.

Legend: B batch, N positions before the reducer, M positions after it, D model width, V vocabulary, S value groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import Cache

from subtoken_train.backbones.attention_row import attention_row
from subtoken_train.backbones.base import Family
from subtoken_train.functional.gather import kept_index, take_rows
from subtoken_train.functional.hashing import sample_seeds
from subtoken_train.reducers import Reducer, ReducerView
from subtoken_train.routing.bank import RouterBank, RoutingState
from subtoken_train.types import Batch, LayerPlan, Plan, Region


@dataclass
class Rows:
    """The rows that run through a span of layers.

    Attributes:
        index_BM: row of the unreduced sequence each one came from; 0 where ``visible`` is False.
        visible_BM: real tokens; False is padding.
        position_BM: position ids (original positions).
        regions_BM: ``Region`` codes.
    """

    index_BM: Tensor
    visible_BM: Tensor
    position_BM: Tensor
    regions_BM: Tensor

    def take(self, keep_BM: Tensor, pad_left: bool) -> tuple[Rows, Tensor]:
        """The kept rows, and the index that gathers other tensors alike."""
        index, valid = kept_index(keep_BM, pad_left)
        regions = take_rows(self.regions_BM, index).masked_fill(~valid, Region.PADDING)
        return Rows(take_rows(self.index_BM, index), valid, take_rows(self.position_BM, index), regions), index


@dataclass
class PromptPass:
    """What a pass over a batch left behind.

    Attributes:
        hidden_BMD: last layer's output, before the final norm.
        rows: the rows of ``hidden``.
        spans: (first layer, last layer + 1, rows) of each stretch of layers that ran on the same rows.
        state: what the routers did; None without routing.
    """

    hidden_BMD: Tensor
    rows: Rows
    spans: list[tuple[int, int, Rows]] = field(default_factory=list)
    state: RoutingState | None = None

    def plan(self) -> Plan:
        """Which entries and value groups every layer's cache holds after this pass."""
        layers = []
        for start, stop, rows in self.spans:
            entries = rows.index_BM.masked_fill(~rows.visible_BM, -1)
            for layer in range(start, stop):
                layers.append(LayerPlan(entries, None if self.state is None else self.state.masks.get(layer)))
        return Plan(layers)

    def labels(self, labels_BN: Tensor) -> Tensor:
        """Labels of the surviving rows, [B, M]; padding gets -100."""
        return take_rows(labels_BN, self.rows.index_BM).masked_fill(~self.rows.visible_BM, -100)


class CompressedBackbone(nn.Module):
    """Family + reducer + router bank. Without a bank it is a token-only arm; with reducer ``none``, the backbone."""

    def __init__(self, family: Family, reducer: Reducer, bank: RouterBank | None = None) -> None:
        super().__init__()
        self.family = family
        self.model = family.model
        self.reducer = reducer
        self.bank = bank
        if bank is not None:
            if bank.config.budget == "ranked":
                reducer.check_ranks()
            attention = [layer.self_attn for layer in family.decoder.layers]
            bank.attach([part.v_proj for part in attention], [part.o_proj for part in attention])

    def run(
        self, batch: Batch, cache: Cache | None = None, pad_left: bool = False, force_gather: bool = False
    ) -> PromptPass:
        """Embed, reduce, and run all decoder layers with routing.

        Args:
            batch: padded prompts, with or without answers.
            cache: filled when given (prefill); values are stored as routed, dropped groups as zeros.
            pad_left: side on which samples with fewer kept rows are padded.
            force_gather: run ranking and gather even at keep_ratio 1 (a test of the machinery).
        """
        family, reducer = self.family, self.reducer
        hidden = family.embed(batch)
        visible = batch.regions_BN != Region.PADDING
        index = torch.arange(hidden.shape[1], device=hidden.device).expand(visible.shape)
        rows = Rows(index, visible, family.positions(visible), batch.regions_BN)
        depth, cut = family.shape.num_layers, reducer.cut_layer
        if reducer.stage == "none" or (reducer.config.keep_ratio == 1 and not force_gather):
            return self._routed_span(batch, hidden, rows, cache, [], cut)
        if cut == 0:
            keep, rank = reducer.select(self._view(batch, lambda layer: self._scout(batch, hidden, rows, layer)))
            rows, gather = rows.take(keep, pad_left)
            return self._routed_span(batch, take_rows(hidden, gather), rows, cache, [], 0, rank)
        last = cut - 1
        hidden = family.run_layers(hidden, rows.visible_BM, rows.position_BM, cache, 0, last)
        with evaluation_mode(family.decoder.layers[last]):
            row = attention_row(family, last, hidden, rows.visible_BM, rows.position_BM, batch.rank_position_B)
        hidden = family.run_layers(hidden, rows.visible_BM, rows.position_BM, cache, last, cut)
        keep, rank = reducer.select(self._view(batch, lambda _: row))
        kept, gather = rows.take(keep, pad_left)
        assert cut < depth
        return self._routed_span(batch, take_rows(hidden, gather), kept, cache, [(0, cut, rows)], cut, rank)

    def logits(self, result: PromptPass) -> Tensor:
        """Logits of a pass's rows, [B, M, V]."""
        return self.family.logits(result.hidden_BMD)

    def _routed_span(
        self,
        batch: Batch,
        hidden: Tensor,
        rows: Rows,
        cache: Cache | None,
        spans: list[tuple[int, int, Rows]],
        start: int,
        rank_BN: Tensor | None = None,
    ) -> PromptPass:
        """Run the layers from ``start`` on under routing; layers before it must have run (``spans``).

        ``rank_BN`` is the reducer's rank of every row of the unreduced sequence.
        """
        depth = self.family.shape.num_layers
        if not spans and start:  # nothing was cut: the layers below still run unrouted
            hidden = self.family.run_layers(hidden, rows.visible_BM, rows.position_BM, cache, 0, start)
            spans = [(0, start, rows)]
        spans = [*spans, (start, depth, rows)]
        if self.bank is None:
            hidden = self.family.run_layers(hidden, rows.visible_BM, rows.position_BM, cache, start, depth)
            return PromptPass(hidden, rows, spans)
        state = RoutingState(
            routed_BN=(rows.regions_BM == Region.VISUAL) | (rows.regions_BM == Region.CONTEXT),
            query_BN=(rows.regions_BM == Region.QUERY) & (rows.index_BM <= batch.rank_position_B[:, None]),
            position_BN=rows.position_BM,
            sample_seed_B=sample_seeds(batch.record_ids, hidden.device),
            rank_BN=None if rank_BN is None else take_rows(rank_BN, rows.index_BM),
        )
        with self.bank.routing(state):
            hidden = self.family.run_layers(hidden, rows.visible_BM, rows.position_BM, cache, start, depth)
        return PromptPass(hidden, rows, spans, state)

    def _view(self, batch: Batch, row: Callable[[int], Tensor]) -> ReducerView:
        """What the reducer may look at."""
        seeds = sample_seeds(batch.record_ids, batch.regions_BN.device)
        return ReducerView(batch.regions_BN, batch.rank_position_B, seeds, row)

    @torch.no_grad()
    def _scout(self, batch: Batch, hidden: Tensor, rows: Rows, layer: int) -> Tensor:
        """Attention row of ``layer`` from an unrouted run of the layers below it, up to the last ranking token."""
        length = int(batch.rank_position_B.max().clamp(min=0)) + 1
        visible, position = rows.visible_BM[:, :length], rows.position_BM[:, :length]
        with evaluation_mode(self.family.decoder):
            below = self.family.run_layers(hidden[:, :length], visible, position, stop=layer)
            row = attention_row(self.family, layer, below, visible, position, batch.rank_position_B)
        return nn.functional.pad(row, (0, hidden.shape[1] - length))


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Dropout and checkpointing off inside the block; every submodule's own mode is restored."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True
