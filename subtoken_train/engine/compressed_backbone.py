"""A backbone with a token reducer and value-group routers: the one path of training, evaluation and generation.

A pass is five stages, which stand in this file in their order:

1. embed: run the vision tower and embed the batch (``tower`` reducers leave fewer features per image);
2. shorten: drop rows before layer 0 (``embeds`` reducers, by a scout's attention);
3. split the context: choose what later rows see of it (``context`` reducers, routing of a text, byte budgets);
4. run the layers, routed from the first one that sees a reduced set on (``decoder`` reducers cut between them);
5. finish: hand over what the pass leaves behind.

Legend: B batch, N positions before the reducer, M positions after it, D model width, V vocabulary, S value groups.
"""

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Self

import torch
from torch import Tensor, nn
from transformers import Cache

from subtoken_train.engine.attention import ContextSplit, check_sdpa, use_packed_attention
from subtoken_train.engine.attention_rows import LayerAttention, query_attention, scouted_row
from subtoken_train.engine.modes import InputObserver, evaluation_mode, gathered_weights
from subtoken_train.engine.prompt_pass import PromptPass, Rows, check_states, joined_rows, question_rows
from subtoken_train.engine.second_pass import context_rows, context_scores, followed, one_budget
from subtoken_train.engine.spans import Chunks, PromptObserver, RunningPass, run_span
from subtoken_train.errors import refuse
from subtoken_train.families.family import Family, check_calibration, check_served
from subtoken_train.families.load import check_on_one_device
from subtoken_train.functional.gather import on_device, take_rows
from subtoken_train.functional.masks import reach_of
from subtoken_train.functional.merging import joined_means
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.ledger.kv_budget import KVBudget
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.reducers.base import ContextReducer, RankingReducer, Reducer, TowerReducer
from subtoken_train.reducers.contexts import ScoredContext
from subtoken_train.reducers.staged import DecoderReducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank, RoutingState
from subtoken_train.types import Batch, KeyAxes, Region, in_compressed_region
from subtoken_train.view.view import ABSENT, View


class CompressedBackbone(nn.Module):
    """A family with a reducer and a router bank: without a bank a token-only arm, with reducer ``none`` the model."""

    def __init__(self, family: Family, reducer: Reducer, bank: RouterBank | None = None) -> None:
        super().__init__()
        check_served(reducer, type(family), family.model.config)
        check_calibration(reducer.calibrated, family)
        self.family, self.model, self.reducer, self.bank = family, family.model, reducer, bank
        self._detached = False
        routing, reads_text = self.active_routing, family.image_token_id is None
        drops_keys = (routing is not None and routing.budget == "bytes") or (bank is not None and bank.gated)
        self.splits = drops_keys or (reads_text and (reducer.stage == "context" or routing is not None))
        """True if the rows of the context and those after it see different caches."""
        if self.splits:
            check_sdpa(family.decoder.config)
            use_packed_attention(family.decoder.config)
        if bank is not None:
            if bank.config.budget == "ranked":
                reducer.check_ranks()
            cuts = f"reducer {reducer.name!r} cuts rows between layers: use one of stage embeds or tower, or none"
            between, pool = bank.config.budget == "bytes" and reducer.stage == "decoder", bank.config.byte_pool
            drops = f"chooses among whole contexts, before reducer {reducer.name!r} drops a token: use reducer none, or"
            reach = "byte_pool 'learned' divides contexts that all layers see"
            gates = "budget 'delayed' counts a delay in the tokens of whole prompts"
            refuse(
                (bank.gated and reducer.acts, f"{gates}: use reducer none"),
                (bank.gated and any(family.windows), f"{gates} that all layers see: use a model without windows"),
                (between, f"budget 'bytes' drops keys in every layer alike, and {cuts}"),
                (pool in ("all", "learned") and reducer.acts, f"byte_pool {pool!r} {drops} byte_pool 'layer'"),
                (pool == "learned" and any(family.windows), f"{reach}: use 'all', or a model without windows"),
            )
            values = [family.projection(layer, "v") for layer in range(family.shape.num_layers)]
            outputs = [layer.self_attn.o_proj for layer in family.decoder.layers]
            bank.attach([each.module for each in values], outputs, values[0].start)
            bank.freeze_below(self.cut_layer)

    @property
    def cut_layer(self) -> int:
        """First layer that sees a reduced set and routes; below it every token stays whole."""
        return self.reducer.cut_layer(self.family.shape.num_layers)

    def train(self, mode: bool = True) -> Self:
        """Switch to training or evaluation; training is refused where the backbone is spread over devices."""
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
        """Budget of a routed entry: K of its S value groups, all where no routing acts; without a keep ratio."""
        if (routing := self.active_routing) is None or self.bank is None:
            return KVBudget()
        alike = routing.budget != "ranked" and all(selector.same_for_all for selector in self.bank.selectors)
        return replace(routing.token_budget, indexed=not alike)

    @property
    def placeless(self) -> bool:
        """True if the visual tokens that stay have no place in the picture: the tower's reducer makes them anew."""
        reducer = self.reducer
        anew = isinstance(reducer, TowerReducer) and reducer.acts and not reducer.keeps_places
        return anew and self.family.tower_positions == "renumber"

    def promised_fraction(self, samples: Sequence[int], key_channels: float = 1.0, key_axes: KeyAxes = "own") -> float:
        """Return the promised share of the region's KV, without the index, for ``samples`` of so many tokens."""
        region = (Region.CONTEXT if self.family.image_token_id is None else Region.VISUAL).label
        shape, budget = self.family.shape, replace(self.group_budget, key_channels=key_channels, key_axes=key_axes)
        layers = [self.reducer.layer_tokens(tokens, shape.num_layers) for tokens in samples if tokens]
        kept = [sum(counts) for counts in zip(*layers, strict=True)]
        tokens, filled = {region: sum(samples)}, sum(bool(tokens) for tokens in samples)
        return nominal_ledger(shape, tokens, budget, self.cut_layer, kept or None, filled).fraction(region)

    def detach(self) -> None:
        """Hand the family on to another backbone; this one runs no more."""
        self._detached = True

    def logits(self, result: PromptPass, rows_BM: Tensor | None = None) -> Tensor:
        """Return the logits of a pass's rows, [B, M, V], or of marked ones (bool [B, M]), [rows, V]."""
        return self.family.logits(result.hidden_BMD if rows_BM is None else result.hidden_BMD[rows_BM])

    def run(
        self,
        batch: Batch,
        cache: Cache | None = None,
        pad_left: bool = False,
        force_gather: bool = False,
        observer: PromptObserver | None = None,
        chunks: Chunks | None = None,
        inputs: InputObserver | None = None,
    ) -> PromptPass:
        """Run a batch through all decoder layers, reduced and routed.

        Args:
            cache: filled when given (prefill), values as routed.
            force_gather: run ranking and gather even at keep_ratio 1 (a test of the machinery).
            observer: sees every layer's attention; needs ``use_packed_attention``.
            chunks: run every layer in chunks of rows into ``cache``, without gradient; needs the same.
            inputs: sees what every layer projects, before ``observer`` sees its attention.
        """
        assert not self._detached, "this backbone's family was handed on to another"
        acts = self.reducer.stage != "none" and (self.reducer.acts or force_gather)
        run = RunningPass(batch, cache, pad_left, observer, inputs, chunks, acts)
        self._embed(run)
        with self.family.as_long_as(run.rows.next_position):
            self._shorten(run)
            later = self._set_aside(run)
            self._split_context(run)
            self._run_layers(run)
            result = self._finish(run)
            if later is not None and cache is not None:
                result = followed(self.family, cache, result, *later, observer)
        if not self.training and cache is None:  # training watches its loss; who fills a cache goes on to logits
            check_states(result.hidden_BMD, result.rows.visible_BM, batch.record_ids)
        return result

    def _embed(self, run: RunningPass) -> None:
        """Stage 1: run the vision tower and embed the batch; a ``tower`` reducer leaves fewer features per image."""
        family, batch = self.family, run.batch
        reducer = self.reducer if run.acts and batch.pixel_values is not None else None
        tower = reducer if isinstance(reducer, TowerReducer) else None
        wanted = None if tower is None else tower.statistics
        states = None if batch.pixel_values is None else family.visual_states(batch, wanted)
        states = on_device(states, batch.regions_BN.device)
        run.rows = Rows.whole(batch.regions_BN, family.positions(batch), family.deep_features(batch, states))
        if tower is None:
            run.hidden_BMD = run.embeds_BND = family.embed(batch, states)
            return
        assert states is not None
        visual_BN = run.rows.regions_BM == Region.VISUAL
        sizes, tokens = [len(image) for image in states.tokens], visual_BN.sum(-1).tolist()
        batch.check_features(sum(tokens), sum(sizes))
        states = replace(states, images_per_sample=images_of_samples(tokens, sizes))
        merged = tower.merge(states, list(run.protected[visual_BN].split_with_sizes(sizes)))
        keep_BN = run.rows.visible_BM.clone()
        keep_BN[visual_BN] = torch.cat(merged.slots)
        run.embeds_BND = family.place(batch, family.project(torch.cat(merged.tokens)), keep_BN)
        run.keep(run.embeds_BND, keep_BN, family.tower_positions)

    def _shorten(self, run: RunningPass) -> None:
        """Stage 2: an ``embeds`` reducer ranks by a scout's attention and drops rows before layer 0."""
        reducer, rows = self.reducer, run.rows
        if not run.acts or reducer.stage != "embeds":
            return
        assert isinstance(reducer, RankingReducer)
        of_rows = run.embeds_BND, rows.visible_BM, rows.position, run.batch.rank_position_B
        how = None if run.chunks is None else run.chunks.size, rows.deep_nBMD, reducer.frozen_scout
        view = View(
            regions_BN=run.batch.regions_BN,
            protected_BN=run.protected,
            rank_position_B=run.batch.rank_position_B,
            sample_seed_B=run.sample_seeds,
            scout=lambda layer: scouted_row(self.family, layer, *of_rows, *how),
            hidden_BND=run.embeds_BND,
            videos=partial(self.family.video_frames, run.batch),
        )
        keep_BN, run.rank_BN, joins_BN, _ = reducer.select(view)
        if joins_BN is not None:
            run.embeds_BND, run.rows = joined_rows(run.embeds_BND, rows, joins_BN)
        run.keep(run.embeds_BND, keep_BN)

    def _set_aside(self, run: RunningPass) -> tuple[Rows, Tensor] | None:
        """Take out, with their embeddings, the rows that run once one budget of all layers has chosen among the others.

        None: it was not asked, or a batch trains or runs in chunks; then ``one_budget`` looks at the contexts first.
        """
        pooled = self.active_routing is not None and self.active_routing.byte_pool == "all"
        if not pooled or run.cache is None or run.chunks is not None:
            return None
        before_BM = context_rows(run.rows.regions_BM)
        later_BM = run.rows.visible_BM & ~before_BM
        if not bool(later_BM.any() & in_compressed_region(run.rows.regions_BM).any()):
            return None
        later, index_BS = run.rows.take(later_BM, pad_left=True)
        aside = later, take_rows(run.hidden_BMD, index_BS)
        run.keep(run.hidden_BMD, before_BM)
        return aside

    def _split_context(self, run: RunningPass) -> None:
        """Stage 3: let rows after a text's context, or under a byte budget, see what is kept of it only."""
        reducer = self.reducer if run.acts and isinstance(self.reducer, ContextReducer) else None
        batch = run.batch
        gated = self.bank is not None and self.bank.gated
        if not self.splits or (reducer is None and self.active_routing is None and not gated):
            return
        if not in_compressed_region(run.rows.regions_BM).any() and bool((batch.labels_BN == IGNORE_INDEX).all()):
            return  # prompts too short to have a context; what is trained still runs every router
        run.state = self._routing_state(run, deferred=True)
        spared_BM, asks_BM = take_rows(run.protected, run.rows.index_BM), question_rows(batch, run.rows)
        collects, of_rows = run.cache is not None, (self.family.windows, run.rows.position, self.family.rotation)
        run.split = ContextSplit(
            *(reducer, run.rows.regions_BM, spared_BM, asks_BM, self.bank, run.state, collects, *of_rows),
            delay=0 if self.bank is None else self.bank.config.window,
            again=context_scores(self.family, reducer, run) if isinstance(reducer, ScoredContext) else {},
        )
        config = self.active_routing
        if self.bank is not None and run.state is not None and config is not None and config.byte_pool == "all":
            held = [run.split.contexts[size][0] for size in self.family.windows]
            if run.cache is None or run.chunks is not None:
                run.state.chosen = one_budget(self.family, self.bank, run, held)
            else:  # nothing reads what stays before the pass has ended
                run.split.bank, run.state = None, replace(run.state, scopes=held, deferred=None)

    def _run_layers(self, run: RunningPass) -> None:
        """Stage 4: run the decoder layers, in stretches on ever fewer rows where a ``decoder`` reducer cuts."""
        depth, start, cutting = self.family.shape.num_layers, 0, None
        stops: tuple[int, ...] = (self.cut_layer,) if self.cut_layer else ()
        if run.acts and isinstance(self.reducer, DecoderReducer) and self.reducer.stage == "decoder":
            ranked = self.bank is not None and self.bank.config.budget == "ranked"
            always = ranked or self.training or not self.reducer.acts  # sharded processes call the same modules
            cutting = Cutting(self.family, self.reducer, run, always)
            stops = self.reducer.cuts(depth)
        if not stops and run.split is None:
            run.state = self._routing_state(run)
        if run.chunks is not None:  # no second pass follows, which would read them
            del run.embeds_BND
        for stop in stops:
            if cutting is None:
                self._run_stretch(run, start, stop)
            else:
                self._run_stretch(run, start, stop - 1)
                below_BMD = run.hidden_BMD
                self._run_stretch(run, stop - 1, stop)
            run.spans.append((start, stop, run.rows))
            if cutting is not None and (cutting.always or any(own[stop] != own[stop - 1] for own in cutting.counts)):
                cutting.cut(run, stop, below_BMD)
            run.state, start = self._routing_state(run), stop
        self._run_stretch(run, start, depth)
        run.spans.append((start, depth, run.rows))

    def _run_stretch(self, run: RunningPass, start: int, stop: int) -> None:
        with nullcontext() if self.bank is None or run.state is None else self.bank.routing(run.state):
            run.hidden_BMD = run_span(self.family, run, start, stop)

    def _routing_state(self, run: RunningPass, deferred: bool = False) -> RoutingState | None:
        if self.bank is None:
            return None
        rows, before = run.rows, run.state
        reads = in_compressed_region(rows.regions_BM), question_rows(run.batch, rows), rows.ordinal_BM
        state = RoutingState(*reads, run.sample_seeds, {} if deferred else None, reach=reach_of(reads[0]))
        if run.rank_BN is not None:
            state.rank_BN = take_rows(run.rank_BN, rows.index_BM)
        if before is not None:  # what the layers below noted
            state.masks, state.keys = before.masks, before.keys
            state.fills, state.choices, state.closed = before.fills, before.choices, before.closed
        if "attention" in self.bank.config.features:
            state.query_attention = query_attention(self.family, rows.visible_BM, rows.position, state.query_BN)
        return state

    def _finish(self, run: RunningPass) -> PromptPass:
        """Stage 5: put routed values into the cache, and hand over what the pass leaves behind."""
        kept, home = dict[int, Tensor](), run.rows.regions_BM.device
        if run.split is not None:
            assert not run.split.faults or not bool(torch.stack(on_device(run.split.faults, home)).any())
            if run.cache is not None:
                routed = run.split.routed
                if self.bank is not None and run.state is not None and run.state.scopes is not None:
                    held = [layer.values for layer in run.cache.layers]
                    routed = dict(enumerate(self.bank.route_noted(run.state, held)))
                for layer, routed_BhNd in routed.items():
                    run.cache.layers[layer].values = routed_BhNd
            kept = on_device(run.split.seen, home)
        left = run.hidden_BMD, run.rows, run.spans, run.state, self.active_routing, kept
        return PromptPass(*left, getattr(run, "embeds_BND", None), self.family.windows)


class Cutting:
    """Makes the cuts of one pass, ``always`` those that keep all, too; looks at embeddings once, before layer 0."""

    def __init__(self, family: Family, reducer: DecoderReducer, run: RunningPass, always: bool = False) -> None:
        self.family, self.reducer, self.always = family, reducer, always
        batch, depth = run.batch, family.shape.num_layers
        visual = (batch.regions_BN == Region.VISUAL).sum(-1).tolist()
        self.counts = [reducer.layer_tokens(tokens, depth) if tokens else [0] * depth for tokens in visual]
        places_N = torch.arange(batch.regions_BN.shape[1], device=batch.regions_BN.device)
        self.prompt_BN = (batch.regions_BN != Region.PADDING) & (places_N <= batch.rank_position_B[:, None])
        with torch.no_grad():
            self.raters_BN = reducer.raters(run.hidden_BMD, batch.regions_BN, self.prompt_BN)

    def cut(self, run: RunningPass, layer: int, below_BMD: Tensor) -> None:
        """Drop the rows that ``layer`` will not see."""
        rows, below = run.rows, self.family.decoder.layers[layer - 1]
        with gathered_weights(below), evaluation_mode(below):
            with torch.no_grad():
                attention = LayerAttention(self.family, layer - 1, below_BMD, rows.visible_BM, rows.position)
            made = self.reducer.cut(self._view(run, layer, attention))
        hidden_BMD = run.hidden_BMD
        if made.joins_BM is not None:
            hidden_BMD = joined_means(hidden_BMD[:, None], made.joins_BM[:, None].to(hidden_BMD.device))[:, 0]
        run.keep(hidden_BMD, made.keep_BM, "original" if rows.position.dim() == 3 else made.policy)
        # layers below the cut hold keys at the places of the whole prompt
        moved = run.rows.position + (rows.next_position - run.rows.next_position)
        run.rows = replace(run.rows, position=moved, next_position=rows.next_position)
        run.rank_BN = None
        if made.rank_BM is not None:  # by the rows of the unreduced sequence; padding points to row 0
            ranks_BM = made.rank_BM.masked_fill(~rows.visible_BM, 0)
            run.rank_BN = torch.zeros_like(run.batch.input_ids_BN).scatter_add_(-1, rows.index_BM, ranks_BM)

    def _view(self, run: RunningPass, layer: int, attention: LayerAttention) -> View:
        rows = run.rows

        def left(marks_BN: Tensor) -> Tensor:
            return take_rows(marks_BN, rows.index_BM) & rows.visible_BM

        prompt_BM = left(self.prompt_BN)
        places_M = torch.arange(prompt_BM.shape[1], device=prompt_BM.device)
        return View(
            layer=layer,
            regions_BN=rows.regions_BM,
            protected_BN=left(run.protected),
            rank_position_B=torch.where(prompt_BM, places_M, -1).amax(-1),
            raters_BN=ABSENT if self.raters_BN is None else left(self.raters_BN),
            count_B=torch.tensor([counts[layer] for counts in self.counts], device=rows.index_BM.device),
            sample_seed_B=run.sample_seeds,
            hidden_BND=run.hidden_BMD,
            key_BhNd=attention.key_BhNd,
            attention=attention.blocks,
            rotary_pull=attention.pull_blocks,
            normed_states=lambda: self.family.decoder.norm(run.hidden_BMD).to(run.hidden_BMD.device),
        )


def images_of_samples(tokens: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """List every sample's images, from its tokens and the batch's image sizes (of a video a frame or two)."""
    bounds = [*accumulate(sizes, initial=0)]
    ends = [bisect_left(bounds, end) for end in accumulate(tokens, initial=0)]
    return [last - first for first, last in pairwise(ends)]
