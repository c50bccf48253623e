"""The routers of all layers, and where they act: on the output of every ``v_proj``, or on the values of a fused one.

A forward hook on the value projection (outside its LoRA) sees input and value vector at once and returns the routed
values, inside ``with bank.routing(...)`` alone. Where some rows read whole values (a text's context), it notes both,
and the attention, which knows what stays, asks ``route_deferred``.

Legend: B batch, N positions, D model width, S value groups, L layers, h key-value heads, s groups of a head, O a
router's outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from subtoken_train.forks import changed, undoing
from subtoken_train.functional import masks
from subtoken_train.functional.gather import last_marked, masked_mean
from subtoken_train.functional.groups import split_groups
from subtoken_train.functional.objective import balance_loss
from subtoken_train.functional.one_budget import best_in_bytes, budget_bytes, cut_logit
from subtoken_train.ledger.kv_budget import KVShape, exact, head_costs
from subtoken_train.routing import SELECTORS, RoutingConfig, build_selector
from subtoken_train.routing.routers import OutputNorms, fp32_linear, init_router
from subtoken_train.routing.shares import HeadShares
from subtoken_train.types import EntryCosts
from subtoken_train.view.view import ABSENT, View

OPEN = 5.0
"""Is added to the logits of gates, so that they start open; their sign then decides."""


class Spent(NamedTuple):
    """A layer's choice within a byte budget."""

    groups_BNS: Tensor  # groups that stay, bool
    keys_BhN: Tensor  # keys that stay, bool; of tokens that are not routed, all
    cut_Bh: Tensor  # the logit of a group that was only just worth its bytes, fp32


@dataclass
class RoutingState:
    """One prompt pass: what is routed (bool), and by layer what the layers did."""

    routed_BN: Tensor
    query_BN: Tensor  # tokens of the query summary, bool
    position_BN: Tensor  # original positions, int64
    sample_seed_B: Tensor
    deferred: dict[int, tuple[Tensor, Tensor]] | None = None
    """The projection's input and output that wait for ``route_deferred``; None where nothing waits."""
    rank_BN: Tensor | None = None
    """The reducer's rank of each routed token within its sample, int64, 0 the best; None where it ranks nothing."""
    reach: slice = field(default_factory=lambda: slice(None))  # rows that hold all routed ones
    masks: dict[int, Tensor] = field(default_factory=dict)  # hard masks, bool [B, N, S]; True in an unrouted token
    keys: dict[int, Tensor] = field(default_factory=dict)
    """Keys that stay under a byte budget, bool [B, h, N], all of an unrouted token; empty under other budgets."""
    scopes: list[Tensor] | None = None
    """Tokens that one budget of all layers chooses among, bool; None outside of the pass that looks for it."""
    scores: dict[int, Tensor] = field(default_factory=dict)  # that pass's logits of groups and keys, [B, N, O] in fp32
    chosen: dict[int, Spent] = field(default_factory=dict)  # the choice of such a budget
    fills: dict[int, Tensor] = field(default_factory=dict)
    """Values that dropped groups read as, [B, d_v] in the values' dtype, without gradient; empty where that is zero."""
    choices: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    """For the balance loss, of learned selectors: the scores, the hard mask, and the tokens it was chosen for."""
    closed: dict[int, Tensor] = field(default_factory=dict)
    """In training under the budget ``delayed``, the mean of how far a layer's gates are closed, with gradient."""
    ahead: dict[int, Tensor] = field(default_factory=dict)  # of a layer that runs in chunks, the projection's output
    query_attention: Callable[[int, Tensor], Tensor] | None = None
    """From layer and input [B, N, D] to the attention of rows ``query_BN`` to all, [B, N] in fp32; None: not read."""
    part: tuple[int, int] = (0, 0)  # the rows of that chunk, (first, one past the last)

    def on(self, device: torch.device) -> Self:
        """Return the state for a layer on a device; what layers note stays in one place."""
        if device == self.routed_BN.device:
            return self
        tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **tensors)

    def groups(self, layer: int) -> Tensor | None:
        """Return the kept groups of a layer, [B, N, S]; None where an entry of a head is whole or gone."""
        mask_BNS, keys_BhN = self.masks.get(layer), self.keys.get(layer)
        whole = mask_BNS is not None and keys_BhN is not None and mask_BNS.shape[2] == keys_BhN.shape[1]
        return None if whole else mask_BNS

    def mean_balance(self) -> Tensor:
        """Return the balance loss averaged over layers and samples, a scalar; 0 where nothing is learned."""
        return self.balances().mean() if self.choices else torch.zeros((), device=self.routed_BN.device)

    def balances(self) -> Tensor:
        """Return the balance loss of each of ``choices`` and sample, [layers, B]; rows that are gone are unrouted."""
        n = max(scores_BNS.shape[1] for scores_BNS, *_ in self.choices.values())
        joined = (
            torch.cat([x if x.shape[1] == n else pad(x, (0, 0) * (x.dim() - 2) + (0, n - x.shape[1])) for x in parts])
            for parts in zip(*self.choices.values(), strict=True)
        )
        return balance_loss(*joined).reshape(len(self.choices), -1)


class ValueGate(nn.Module):
    """One layer's factor 2 * sigmoid(beta * logit) on kept groups; the learned number beta starts at 0: factor 1."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def forward(self, logits_BNS: Tensor) -> Tensor:
        """Return the factors [B, N, S] in fp32, between 0 and 2."""
        return 2 * torch.sigmoid(self.beta.float() * logits_BNS)


class FeatureMap(nn.Module):
    """One layer's learned map from standardised logs of value norms or query attention to a router's logits (ours)."""

    def __init__(self, config: RoutingConfig, outputs: int) -> None:
        super().__init__()
        self.names = config.features
        width = sum(config.num_groups if name == "norm" else 1 for name in self.names)
        self.map = nn.Linear(width, outputs, bias=False)
        init_router(self)

    def forward(self, view: View, routed_BN: Tensor) -> Tensor:
        """Return what is added to a router's logits, [B, N, O] in fp32; ``routed_BN`` marks the compared tokens."""
        raw: dict[str, Callable[[], Tensor]] = {
            "norm": lambda: torch.linalg.vector_norm(view.value_groups_BNSg.detach().float(), dim=-1),
            "attention": lambda: view.query_attention()[..., None],
        }
        read = [masks.standardised_log(raw[name](), routed_BN) for name in self.names]
        return fp32_linear(self.map, torch.cat(read, -1))


@dataclass(frozen=True)
class LateValues:
    """A layer's tokens, as rows after them read them."""

    value_BhNd: Tensor  # routed values: unselected groups filled, kept ones gated
    learns_BN: Tensor  # tokens that had a choice, bool; the choice of all others has no gradient
    keys_BhN: Tensor | None = None  # keys that stay, bool; of tokens that are not routed, all. None: every key stays
    key_logits_BhN: Tensor | None = None  # logits by which they were chosen, fp32; None likewise
    gate_BhN: Tensor | None = None  # under a delay, log of how far entries are seen after it, fp32; None: no delay


class RouterBank(nn.Module):
    """One selector per decoder layer, with its value gate; ``attach`` hooks them to the value projections.

    A dropped group reads as zero or, with the fill ``mean`` (ours), as the mean of the sample's routed tokens in that
    layer: v' = mu + f * (v - mu), and the norms that choose are then of v - mu. Choice, straight-through sigmoid,
    balance loss and gate all read the sum of logits and score prior. Where K = S the gate's gradient is exact.
    """

    def __init__(self, config: RoutingConfig, hidden_size: int, shape: KVShape) -> None:
        super().__init__()
        config.check(shape)
        self.config, self.shape = config, shape
        self.whole = config.budget == "bytes" and config.num_groups == shape.num_kv_heads
        """True where an entry's only group goes with its key."""
        self.gated = config.budget == "delayed"  # true where gates, one of a head, drop entries after a delay
        keys, layers = shape.num_kv_heads if self.gated or config.budget == "bytes" else 0, range(shape.num_layers)
        self.outputs = keys if self.whole or self.gated else config.num_groups + keys
        scored = replace(config, num_groups=self.outputs)
        self.selectors = nn.ModuleList([build_selector(hidden_size, scored) for _ in layers])
        self.gates = nn.ModuleList([ValueGate() for _ in layers if config.value_gate])
        self.features = nn.ModuleList([FeatureMap(config, self.outputs) for _ in layers if config.features])
        self.shares = HeadShares(config, shape) if config.byte_pool == "learned" else None
        self.prior = None if config.score_prior == "none" else SELECTORS[config.score_prior](hidden_size, config)
        self._output_norms: OutputNorms | None = None
        self._state: RoutingState | None = None
        self._projections: list[nn.Module] = []  # a list: no parts of the bank
        self._value_start = 0

    @property
    def learned(self) -> bool:
        """True if selectors, gates or features have parameters to train."""
        return any(parameter.requires_grad for parameter in self.parameters())

    @property
    def reads_query(self) -> bool:
        """True if the choice depends on the question."""
        return "attention" in self.config.features or any(part.query_conditioned for part in self.selectors)

    @property
    def neutral(self) -> bool:
        """True if every group is kept as it is; under ``delayed`` too, whose gates evict."""
        return self.gated or (not self.config.drops and not self.config.value_gate)

    def attach(
        self, value_projections: Sequence[nn.Module], output_projections: Sequence[nn.Module], value_start: int = 0
    ) -> None:
        """Say where ``routing`` acts: every layer's value projection, LoRA included, from channel ``value_start``."""
        self._value_start = value_start
        if any(part.reads_output for part in (*self.selectors, self.prior) if part is not None):
            self._output_norms = OutputNorms(output_projections, self.config, self.shape)
        self._projections = list(value_projections)

    def freeze_below(self, layer: int) -> None:
        """Train nothing in the layers below ``layer``: they hold every token whole, and their routers never run."""
        for part in (*self.selectors[:layer], *self.gates[:layer], *self.features[:layer]):
            part.requires_grad_(False)

    def place(self, devices: Sequence[torch.device]) -> None:
        """Put every layer's selector, gate and map of features where the layer lies."""
        for parts in (self.selectors, self.gates, self.features):
            for part, device in zip(parts, devices, strict=False):
                part.to(device)
        if self.shares is not None:
            self.shares.to(devices[0])

    @contextmanager
    def routing(self, state: RoutingState) -> Iterator[RoutingState]:
        """Route every value projection run inside this block, with ``state``'s tokens."""
        first, hooks = self._state is None, ExitStack()
        with undoing(hooks.close), changed(self, _state=state):
            if first:
                for layer, module in enumerate(self._projections):
                    hooks.callback(module.register_forward_hook(partial(self._hook, layer)).remove)
            yield state

    def paused(self) -> AbstractContextManager[None]:
        """Route nothing inside this block, though it runs inside another's."""
        return changed(self, _state=None)

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """Return checkpointing's ``context_fn``: a layer is recomputed under the state it first ran with."""
        state = self._state
        return nullcontext(), nullcontext() if state is None else self.routing(state)

    def _hook(self, layer: int, module: nn.Module, args: tuple[Tensor, ...], output_BND: Tensor) -> Tensor:
        state, start = self._state, self._value_start
        if state is None:  # see ``query_attention``
            return output_BND
        value_BND = output_BND[..., start:] if start else output_BND
        if state.scopes is not None:
            here, scope_BN = state.on(value_BND.device), state.scopes[layer].to(value_BND.device)
            state.scores[layer] = self._scores(layer, args[0], value_BND, here, scope_BN).to(scope_BN.device)
            return output_BND
        if layer in state.ahead:
            value_BND = state.ahead[layer][:, slice(*state.part)]
        elif state.deferred is not None:
            state.deferred[layer] = (args[0], value_BND)
        else:
            routed = self._route(layer, args[0], value_BND, state, state.routed_BN)
            value_BND = routed.value_BhNd.transpose(1, 2).flatten(2)
        return torch.cat([output_BND[..., :start], value_BND.to(output_BND)], -1) if start else value_BND

    def route_deferred(self, layer: int, state: RoutingState, routed_BN: Tensor) -> LateValues:
        """Route, as its second step, a layer whose routing was deferred: by the projection that just ran."""
        assert state.deferred is not None
        return self._route(layer, *state.deferred.pop(layer), state, routed_BN)

    def _route(
        self, layer: int, hidden_BND: Tensor, value_BND: Tensor, state: RoutingState, routed_BN: Tensor
    ) -> LateValues:
        config, device = self.config, value_BND.device
        routed_BN = routed_BN.to(device)
        fill_BV = masked_mean(value_BND, routed_BN) if config.fill == "mean" else None  # with the mean's gradient
        left_BND = value_BND
        if fill_BV is not None:
            left_BND = value_BND.detach() - fill_BV.detach()[:, None].to(value_BND.dtype)
            state.fills[layer] = fill_BV.detach().to(value_BND.dtype)
        scores_BNO = self._scores(layer, hidden_BND.to(device), left_BND, state.on(device), routed_BN)
        return self._kept(layer, scores_BNO, value_BND, state, routed_BN, fill_BV)

    def route_noted(self, state: RoutingState, values: Sequence[Tensor]) -> list[Tensor]:
        """Choose in all layers at once, after a pass that noted its logits: projected values to held, [B, h, N, d]."""
        assert state.scopes is not None
        scores, routed = [state.scores[layer] for layer in range(len(values))], []
        state.chosen = dict(enumerate(self.spend(scores, state.scopes)))
        for layer, value_BhNd in enumerate(values):
            own = scores[layer].to(value_BhNd.device), value_BhNd.transpose(1, 2).flatten(2)
            routed.append(self._kept(layer, *own, state, state.scopes[layer].to(value_BhNd.device)).value_BhNd)
        return routed

    def _kept(
        self,
        layer: int,
        scores_BNO: Tensor,
        value_BND: Tensor,
        state: RoutingState,
        routed_BN: Tensor,
        fill_BV: Tensor | None = None,
    ) -> LateValues:
        config, heads, home, device = self.config, self.shape.num_kv_heads, state.routed_BN.device, value_BND.device
        if self.gated:
            return self._gate(layer, scores_BNO.mT, value_BND, state, routed_BN)
        scores_BNS, keys_BhN, key_logits_BhN = scores_BNO[..., : config.num_groups], None, None
        learns_BN, margin_BNS = routed_BN, scores_BNS
        slope: tuple[Tensor, Tensor] | None = None
        if config.budget == "bytes":
            chosen = state.chosen[layer] if layer in state.chosen else self.spend([scores_BNO], [routed_BN], layer)[0]
            hard_BNS, keys_BhN, cut_Bh = (part.to(device) for part in chosen)
            learns_BN = routed_BN & ~self._always(routed_BN) if config.drops else torch.zeros_like(routed_BN)
            if self.shares is not None and torch.is_grad_enabled():
                cut_Bh = self.shares.joined(layer, cut_Bh, scores_BNO, learns_BN)
            cut_BS = cut_Bh.repeat_interleave(config.num_groups // cut_Bh.shape[1], 1)
            margin_BNS, key_logits_BhN = scores_BNS - cut_BS[:, None], scores_BNO[..., config.num_groups :].mT
            state.keys[layer], key_logits_BhN = keys_BhN.to(home), key_logits_BhN - cut_Bh[..., None]
        else:
            hard_BNS = torch.zeros_like(scores_BNS, dtype=torch.bool)
            hard_BNS[:, state.reach] = self._choose(scores_BNS.detach(), state.on(device), routed_BN)
        routed_BN1 = routed_BN[..., None]
        factor_BNS = hard_BNS | ~routed_BN1
        state.masks[layer] = factor_BNS.to(home)
        if self.selectors[layer].learned:
            # not overwritten when checkpointing recomputes a layer: the state would hold on to that graph
            state.choices.setdefault(layer, (scores_BNS, hard_BNS, routed_BN))
            if config.drops and not self.whole and torch.is_grad_enabled():  # the sigmoid's slope at its margin
                slope = margin_BNS, learns_BN[..., None]
                if config.value_gate or fill_BV is not None:
                    factor_BNS, slope = masks.straight_through(factor_BNS, *slope), None
            if config.value_gate:
                factor_BNS = torch.where(routed_BN1, factor_BNS * self.gates[layer](scores_BNS), 1.0)
        if not self.whole or config.value_gate:  # nobody reads a value whose key is gone
            value_BND = masks.apply_group_mask(value_BND, factor_BNS, heads, config.layout, fill_BV, slope)
        value_BhNd = torch.unflatten(value_BND, -1, (heads, -1)).transpose(1, 2)
        return LateValues(value_BhNd, learns_BN, keys_BhN, key_logits_BhN)

    def _gate(
        self, layer: int, logits_BhN: Tensor, value_BND: Tensor, state: RoutingState, routed_BN: Tensor
    ) -> LateValues:
        """Gates of a layer: soft, with the difference of two draws from Gumbel's distribution, while they train."""
        if self.training:
            uniform_BhN = torch.rand_like(logits_BhN).clamp(1e-6, 1 - 1e-6)
            seen_BhN = logsigmoid(logits_BhN + uniform_BhN.logit())
            count = (routed_BN.sum() * self.shape.num_kv_heads).clamp(min=1)
            closed = ((1 - seen_BhN.exp()) * routed_BN[:, None]).sum() / count
            state.closed.setdefault(layer, closed.to(state.routed_BN.device))
        else:
            seen_BhN = torch.where(logits_BhN >= 0, 0.0, -torch.inf)
        state.masks[layer] = torch.ones_like(state.routed_BN[..., None])
        value_BhNd = torch.unflatten(value_BND, -1, (self.shape.num_kv_heads, -1)).transpose(1, 2)
        return LateValues(value_BhNd, routed_BN, gate_BhN=torch.where(routed_BN[:, None], seen_BhN, 0.0))

    def gate_logits(self, layer: int, input_BND: Tensor) -> Tensor:
        """Return the logits of a layer's gates, [B, h, N] in fp32: an entry stays where they are 0 or more."""
        assert self.gated
        logits_BNh: Tensor = self.selectors[layer](View(hidden_BND=input_BND))
        return (logits_BNh + OPEN).mT

    def _scores(
        self, layer: int, hidden_BND: Tensor, value_BND: Tensor, state: RoutingState, routed_BN: Tensor
    ) -> Tensor:
        """Scores of groups, and keys behind them, [B, N, S + h] in fp32; values without what dropped groups read as."""
        selector, config = self.selectors[layer], self.config

        def query_attention() -> Tensor:
            assert state.query_attention is not None
            with self.paused():  # a fused projection runs again, for queries and keys
                return state.query_attention(layer, hidden_BND).to(value_BND.device)

        view = View(
            hidden_BND=hidden_BND,
            value_groups_BNSg=split_groups(value_BND, config.num_groups, self.shape.num_kv_heads, config.layout),
            query_summary_BD=masked_mean(hidden_BND, state.query_BN) if selector.query_conditioned else ABSENT,
            ordinal_BN=state.position_BN,
            sample_seed_B=state.sample_seed_B,
            layer=layer,
            output_norms=ABSENT if self._output_norms is None else partial(self._output_norms, layer, value_BND),
            query_attention=ABSENT if state.query_attention is None else query_attention,
            num_kv_heads=self.shape.num_kv_heads,
        )
        scores_BNO: Tensor = selector(view)
        if self.gated:
            return scores_BNO + OPEN
        shape = torch.Size([*hidden_BND.shape[:2], self.outputs])
        if not (isinstance(scores_BNO, Tensor) and scores_BNO.shape == shape and scores_BNO.dtype == torch.float32):
            got = f"no tensor but {type(scores_BNO).__name__}"  # a selector may be another package's
            if isinstance(scores_BNO, Tensor):
                got = f"{str(scores_BNO.dtype).removeprefix('torch.')} scores of shape {list(scores_BNO.shape)}"
            must = f"it must give float32 scores of shape {list(shape)}: batch, tokens, groups"
            raise ValueError(f"selector {config.selector!r} gave {got} in layer {layer}; {must}")
        if self.features:
            scores_BNO = scores_BNO + self.features[layer](view, routed_BN)
        if self.prior is not None:
            prior_BNS = masks.standardised_log(self.prior(view), routed_BN)  # of groups; keys have none
            scores_BNO = scores_BNO + pad(prior_BNS, (0, self.outputs - config.num_groups))
        return torch.cat([scores_BNO, scores_BNO], -1) if self.whole else scores_BNO

    def _choose(self, scores_BNS: Tensor, state: RoutingState, routed_BN: Tensor) -> Tensor:
        config, reach = self.config, state.reach
        scores_BNS, routed_BN = scores_BNS[:, reach], routed_BN[:, reach]
        if config.budget == "global":
            return masks.global_mask(scores_BNS, config.kept_groups, routed_BN)
        if config.budget == "ranked":
            assert state.rank_BN is not None
            counts_BN = masks.ranked_counts(state.rank_BN[:, reach], routed_BN, config.kept_groups, config.num_groups)
            return masks.counted_mask(scores_BNS, counts_BN)
        return masks.fixed_mask(scores_BNS, config.kept_groups)

    def spend(self, scores: Sequence[Tensor], routed: Sequence[Tensor], first: int = 0) -> list[Spent]:
        """Spend a byte budget on layers, ``first`` the first, by logits [B, N, S + h] of marked tokens [B, N]."""
        config, heads = self.config, self.shape.num_kv_heads
        logits = [(x.detach()[..., : config.num_groups], x.detach()[..., config.num_groups :]) for x in scores]
        if not config.drops:  # the index would not be paid for
            kept = [(torch.ones_like(x, dtype=torch.bool), torch.ones_like(y, dtype=torch.bool).mT) for x, y in logits]
            return [Spent(*both, scores[0].new_zeros(both[1].shape[:2])) for both in kept]
        both = list(routed), [self._always(marks_BN) for marks_BN in routed]
        competes_BhN, always_BhN = (torch.stack(marks, 1).repeat_interleave(heads, 1) for marks in both)
        key_BhN = torch.cat([keys_BNh.mT for _, keys_BNh in logits], 1)
        offered_BhNs = torch.cat([torch.unflatten(x, -1, (heads, -1)).transpose(1, 2) for x, _ in logits], 1)
        costs, pooled = head_costs(self.shape, config.num_groups), config.byte_pool in ("layer", "all")
        if self.whole:  # a key is offered with its group, not before it
            offered_BhNs, costs = offered_BhNs[..., :0], EntryCosts(costs.key + costs.group, costs.dense, costs.dense)
        count_B = competes_BhN.sum((1, 2)) if pooled else routed[0].sum(-1)
        budget = budget_bytes(count_B, costs.dense, exact(config.byte_share))
        if self.shares is not None:
            budget = self.shares.spent(first, count_B, both[1][0].sum(-1))
        keys_BhN, groups_BhNs = best_in_bytes(key_BhN, offered_BhNs, competes_BhN, always_BhN, costs, budget, pooled)
        cut_Bh = cut_logit(key_BhN, offered_BhNs, keys_BhN & ~always_BhN, groups_BhNs, costs, pooled)
        parts = keys_BhN, keys_BhN[..., None] if self.whole else groups_BhNs, cut_Bh
        by_layer = zip(*(x.chunk(len(routed), 1) for x in parts), routed, strict=True)
        return [
            Spent(groups.transpose(1, 2).flatten(2), keys | ~own_BN[:, None], cut)
            for keys, groups, cut, own_BN in by_layer
        ]

    def _always(self, routed_BN: Tensor) -> Tensor:
        return routed_BN & ((routed_BN.cumsum(-1) <= self.config.sinks) | last_marked(routed_BN, self.config.window))
