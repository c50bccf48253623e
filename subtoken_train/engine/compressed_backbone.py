"""A backbone with a token reducer and value-group routers: the one path of training, evaluation and generation.

Legend: B batch, N positions before the reducer, M positions after it, D model width, V vocabulary, S value groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache

from subtoken_train.engine.attention import ContextSplit, check_sdpa, use_packed_attention
from subtoken_train.engine.attention_rows import query_attention, scouted_row
from subtoken_train.engine.prompt_pass import (
    PromptPass,
    Rows,
    asking_rows,
    check_states,
    joined_rows,
    reducer_view,
    routing_state,
)
from subtoken_train.engine.reduction import CutCourse, tower_reduced
from subtoken_train.engine.spans import Chunks, PassCall, PromptObserver, run_span
from subtoken_train.families.family import Family, check_reducer
from subtoken_train.families.load import check_on_one_device
from subtoken_train.functional.gather import take_rows
from subtoken_train.functional.moving import on_device
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.ledger.kv_budget import KVBudget
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.reducers.base import RankingReducer, Reducer, TowerReducer
from subtoken_train.reducers.context import ContextReducer
from subtoken_train.reducers.staged import DecoderReducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank
from subtoken_train.routing.state import RoutingState
from subtoken_train.types import Batch, Region


class CompressedBackbone(nn.Module):
    """Family + reducer + router bank. Without a bank it is a token-only arm; with reducer ``none``, the backbone."""

    def __init__(self, family: Family, reducer: Reducer, bank: RouterBank | None = None) -> None:
        super().__init__()
        self.family = family
        self.model = family.model
        self.reducer = reducer
        self.bank = bank
        check_reducer(reducer, family)
        self._hooks: list[RemovableHandle] | None = []
        self.splits = family.image_token_id is None and (reducer.stage == "context" or self.active_routing is not None)
        """Whether context and query rows of a language model see different caches."""
        if self.splits:
            check_sdpa(family.decoder.config)
            use_packed_attention(family.decoder.config)
        if bank is not None:
            if bank.config.budget == "ranked":
                reducer.check_ranks()
            attention = [layer.self_attn for layer in family.decoder.layers]
            self._hooks = bank.attach([part.v_proj for part in attention], [part.o_proj for part in attention])
            bank.freeze_below(self.cut_layer)

    @property
    def cut_layer(self) -> int:
        """First layer that sees a reduced set and routes; below it every token stays whole."""
        return self.reducer.cut_layer(self.family.shape.num_layers)

    def train(self, mode: bool = True) -> CompressedBackbone:
        """As every module's; a backbone that is spread over devices is refused."""
        if mode:
            check_on_one_device(self.model, "training")
        super().train(mode)
        return self

    @property
    def active_routing(self) -> RoutingConfig | None:
        """Settings of the routing that acts; None without routers, and where they keep every group as it is."""
        return None if self.bank is None or self.bank.neutral else self.bank.config

    @property
    def group_budget(self) -> KVBudget:
        """What a routed entry stores: K of its S value groups, all where no routing acts; without a keep ratio."""
        routing = self.active_routing
        return KVBudget() if routing is None else routing.token_budget

    @property
    def placeless(self) -> bool:
        """Whether the visual tokens that stay have no place in the picture: the tower's reducer makes them anew."""
        reducer = self.reducer
        anew = isinstance(reducer, TowerReducer) and reducer.acts and not reducer.keeps_places
        return anew and self.family.tower_positions == "renumber"

    def promised_fraction(self, samples: Sequence[int], key_channels: float = 1.0) -> float:
        """Share of the compressed region's KV that reducer and routing promise, without the index; 1 where it is empty.

        Args:
            samples: tokens of each one's compressed region, before the reducer.
            key_channels: share of their keys that stays.
        """
        region = (Region.CONTEXT if self.family.image_token_id is None else Region.VISUAL).label
        shape, budget = self.family.shape, replace(self.group_budget, key_channels=key_channels)
        layers = [self.reducer.layer_tokens(tokens, shape.num_layers) for tokens in samples if tokens]
        kept = [sum(counts) for counts in zip(*layers, strict=True)]
        tokens, filled = {region: sum(samples)}, sum(bool(tokens) for tokens in samples)
        return nominal_ledger(shape, tokens, budget, self.cut_layer, kept or None, filled).fraction(region)

    def detach(self) -> None:
        """Take the routers off the family, which another backbone can then use; this one runs no more."""
        for hook in self._hooks or ():
            hook.remove()
        self._hooks = None

    def run(
        self,
        batch: Batch,
        cache: Cache | None = None,
        pad_left: bool = False,
        force_gather: bool = False,
        observer: PromptObserver | None = None,
        chunks: Chunks | None = None,
    ) -> PromptPass:
        """Embed, reduce, and run all decoder layers with routing.

        Args:
            batch: padded prompts, with or without answers.
            cache: filled when given (prefill), values as routed, dropped groups (0, or filled) too, until it is packed.
            pad_left: side on which samples with fewer kept rows are padded.
            force_gather: run ranking and gather even at keep_ratio 1 (a test of the machinery).
            observer: sees every layer's attention; needs ``use_packed_attention``.
            chunks: run every layer in chunks of rows into ``cache``, without gradient; needs the same.

        Raises:
            ValueError: in evaluation mode and without a cache, NaN or infinity in what the last layer gives.
        """
        assert self._hooks is not None, "this backbone's family was handed on to another"
        family, reducer, call = self.family, self.reducer, PassCall(batch, cache, pad_left, observer, chunks)
        neutral = reducer.stage == "none" or not (reducer.acts or force_gather)
        tower = reducer if isinstance(reducer, TowerReducer) and not (neutral or batch.pixel_values is None) else None
        states = family.visual_states(batch, None if tower is None else tower.statistics)
        states = on_device(states, batch.regions_BN.device)
        rows = Rows.whole(batch.regions_BN, family.positions(batch), family.deep_features(batch, states))
        if tower is not None:
            assert states is not None
            hidden, keep = tower_reduced(family, tower, batch, rows, states)
            rows, gather = rows.take(keep, pad_left, family.tower_positions)
            with family.as_long_as(rows.next_position):
                result = self._routed_span(call, take_rows(hidden, gather), rows, 0)
        else:
            hidden = family.embed(batch, states)
            with family.as_long_as(rows.next_position):
                result = self._run_embedded(call, hidden, rows, neutral or reducer.stage == "tower")
        result.embeds_BND = hidden if result.embeds_BND is None else result.embeds_BND
        result.routing, result.windows = self.active_routing, family.windows
        if not self.training and cache is None:  # training watches its loss; who fills a cache goes on to logits
            check_states(result.hidden_BMD, result.rows.visible_BM, batch.record_ids)
        return result

    def _run_embedded(self, call: PassCall, hidden: Tensor, rows: Rows, neutral: bool) -> PromptPass:
        family, reducer = self.family, self.reducer
        if self.splits and (not neutral or self.active_routing is not None):
            return self._context_split(call, hidden, rows, None if neutral else reducer)
        if neutral:
            return self._routed_span(call, hidden, rows, self.cut_layer)
        if reducer.stage == "embeds":
            assert isinstance(reducer, RankingReducer)
            size = None if call.chunks is None else call.chunks.size
            scouting = (hidden, rows.visible_BM, rows.position, call.batch.rank_position_B)
            way = (size, rows.deep_nBMD, reducer.frozen_scout)
            view = reducer_view(call.batch, lambda layer: scouted_row(family, layer, *scouting, *way))
            keep, rank, joins = reducer.select(view)
            if joins is not None:
                hidden, rows = joined_rows(hidden, rows, joins)
            taken, gather = rows.take(keep, call.pad_left)
            result = self._routed_span(call, take_rows(hidden, gather), taken, 0, rank)
            result.embeds_BND = hidden
            return result
        assert isinstance(reducer, DecoderReducer)
        return self._decoder_reduced(reducer, call, hidden, rows)

    def logits(self, result: PromptPass, rows_BM: Tensor | None = None) -> Tensor:
        """Logits of a pass's rows, [B, M, V]; of some of them (bool [B, M]), [rows, V]."""
        return self.family.logits(result.hidden_BMD if rows_BM is None else result.hidden_BMD[rows_BM])

    def _context_split(self, call: PassCall, hidden: Tensor, rows: Rows, reducer: Reducer | None) -> PromptPass:
        """All rows run; from each layer's cache, query rows see kept context tokens and routed values only."""
        assert reducer is None or isinstance(reducer, ContextReducer)
        batch, cache, regions, depth = call.batch, call.cache, rows.regions_BM, self.family.shape.num_layers
        if not bool((regions == Region.CONTEXT).any()):
            if bool((batch.labels_BN == IGNORE_INDEX).all()):  # prompts too short to have a context
                return self._routed_span(call, hidden, rows, 0)
            raise ValueError(
                f"no record of the batch ({batch.record_ids[0]}, ...) has a context to compress; a language model's "
                "reducer and routers need packed text (data.train) or prompts with a context"
            )
        state = None if self.bank is None else routing_state(batch, rows, deferred=True)
        placed = self.family.windows, rows.position, self.family.rotation
        split = ContextSplit(reducer, regions, asking_rows(batch, rows), self.bank, state, cache is not None, *placed)
        hidden = self._layers(call, hidden, rows, 0, depth, split, state)
        if cache is not None:
            for layer, routed_BhNd in split.routed.items():
                cache.layers[layer].values = routed_BhNd
        return PromptPass(hidden, rows, [(0, depth, rows)], state, kept=on_device(split.seen, regions.device))

    def _decoder_reduced(self, reducer: DecoderReducer, call: PassCall, hidden: Tensor, rows: Rows) -> PromptPass:
        """Stretches of layers on ever fewer rows; below the first cut nothing is routed."""
        ranked = self.bank is not None and self.bank.config.budget == "ranked"
        always = ranked or self.training or not reducer.acts  # trained in parts, all processes call the same modules
        course, start = CutCourse(self.family, reducer, call, hidden, always), 0
        spans: list[tuple[int, int, Rows]] = []
        state: RoutingState | None = None
        for cut in course.layers:
            given = self._layers(call, hidden, rows, start, cut - 1, state=state)
            hidden = self._layers(call, given, rows, cut - 1, cut, state=state)
            spans.append((start, cut, rows))
            if not course.keeps_all(cut):
                rows, hidden = course.cut(cut, given, hidden, rows)
            start = cut
            if self.bank is not None:
                state = routing_state(call.batch, rows, course.rank_BN, before=state)
        hidden = self._layers(call, hidden, rows, start, course.depth, state=state)
        return PromptPass(hidden, rows, [*spans, (start, course.depth, rows)], state)

    def _routed_span(
        self, call: PassCall, hidden: Tensor, rows: Rows, start: int, rank_BN: Tensor | None = None
    ) -> PromptPass:
        """All layers on the same rows, those from ``start`` on under routing.

        ``rank_BN`` is the reducer's rank of every row of the unreduced sequence.
        """
        depth, spans = self.family.shape.num_layers, []
        if start:
            hidden = self._layers(call, hidden, rows, 0, start)
            spans = [(0, start, rows)]
        state = None if self.bank is None else routing_state(call.batch, rows, rank_BN)
        hidden = self._layers(call, hidden, rows, start, depth, state=state)
        return PromptPass(hidden, rows, [*spans, (start, depth, rows)], state)

    def _layers(
        self,
        call: PassCall,
        hidden: Tensor,
        rows: Rows,
        start: int,
        stop: int,
        split: ContextSplit | None = None,
        state: RoutingState | None = None,
    ) -> Tensor:
        """Decoder layers on ``rows``, under routing where there is a ``state``."""
        if state is not None and self.bank is not None and "attention" in self.bank.config.features:
            state.query_attention = query_attention(self.family, rows.visible_BM, rows.position, state.query_BN)
        with nullcontext() if self.bank is None or state is None else self.bank.routing(state):
            return run_span(self.family, call, hidden, rows, start, stop, split, state)
