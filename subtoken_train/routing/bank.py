"""The routers of all layers, and where they act: on the output of every ``v_proj``.

A forward hook on the value projection (outside its LoRA) sees the router's input and the value vector at once and
returns the routed values; q, k, positions, scores and ``o_proj`` are untouched, and any attention implementation
works. The hooks do nothing outside ``with bank.routing(...)``: decoding never calls a router.

Legend: B batch, N positions, D model width, S value groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from subtoken_train.functional.balance import balance_loss
from subtoken_train.functional.groups import apply_group_mask, split_groups
from subtoken_train.functional.ledger import KVShape
from subtoken_train.functional.masks import fixed_mask, global_mask
from subtoken_train.functional.straight_through import straight_through
from subtoken_train.routing import RoutingConfig, SelectorInput, build_selector


@dataclass
class RoutingState:
    """One prompt pass: what is routed, and what the layers did.

    Attributes:
        routed_BN: tokens that are routed, bool; all others keep every group.
        query_BN: tokens of the query summary, bool.
        position_BN: original positions, int64.
        sample_seed_B: a number per sample, int64.
        masks: per layer the hard mask, bool [B, N, S]; True for every group of an unrouted token.
        apart: leave the projection's output as it is and put the routed values in ``values``: some rows of the layer
            (a language model's context) still read whole values.
        values: per layer the routed values, [B, N, d_v], where ``apart``.
        balance: per layer the balance loss of each sample, [B]; learned selectors only.
    """

    routed_BN: Tensor
    query_BN: Tensor
    position_BN: Tensor
    sample_seed_B: Tensor
    apart: bool = False
    values: dict[int, Tensor] = field(default_factory=dict)
    masks: dict[int, Tensor] = field(default_factory=dict)
    balance: dict[int, Tensor] = field(default_factory=dict)

    def mean_balance(self) -> Tensor:
        """Balance loss averaged over layers and samples, a scalar; 0 where nothing is learned."""
        if not self.balance:
            return torch.zeros((), device=self.routed_BN.device)
        return torch.stack(list(self.balance.values())).mean()


class RouterBank(nn.Module):
    """One selector per decoder layer; ``attach`` hooks them to the value projections."""

    def __init__(self, config: RoutingConfig, hidden_size: int, shape: KVShape) -> None:
        super().__init__()
        config.check(shape)
        self.config = config
        self.shape = shape
        self.selectors = nn.ModuleList([build_selector(hidden_size, config) for _ in range(shape.num_layers)])
        self._state: RoutingState | None = None

    @property
    def learned(self) -> bool:
        """Whether the selectors have parameters to train."""
        return any(parameter.requires_grad for parameter in self.parameters())

    @property
    def neutral(self) -> bool:
        """Whether every group is kept as it is."""
        return self.config.kept_groups == self.config.num_groups

    def attach(self, value_projections: Sequence[nn.Module]) -> list[RemovableHandle]:
        """Hook every layer's value projection (its outermost module, LoRA included); returns the handles."""
        assert len(value_projections) == len(self.selectors)
        return [module.register_forward_hook(partial(self._route, i)) for i, module in enumerate(value_projections)]

    @contextmanager
    def routing(self, state: RoutingState) -> Iterator[RoutingState]:
        """Route every value projection run inside this block, with ``state``'s tokens."""
        previous, self._state = self._state, state
        try:
            yield state
        finally:
            self._state = previous

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """``context_fn`` of non-reentrant checkpointing: a layer is recomputed under the state it first ran with."""
        state = self._state
        return nullcontext(), nullcontext() if state is None else self.routing(state)

    def _route(self, layer: int, module: nn.Module, args: tuple[Tensor, ...], value_BND: Tensor) -> Tensor:
        """Forward hook of a value projection: values with the unselected groups of routed tokens zeroed."""
        state, config = self._state, self.config
        if state is None:
            return value_BND
        selector = self.selectors[layer]
        hidden_BND = args[0]
        view = SelectorInput(
            hidden_BND=hidden_BND,
            value_groups_BNSg=split_groups(value_BND, config.num_groups, self.shape.num_kv_heads, config.layout),
            query_summary_BD=_masked_mean(hidden_BND, state.query_BN) if selector.query_conditioned else None,
            position_BN=state.position_BN,
            sample_seed_B=state.sample_seed_B,
            layer=layer,
        )
        scores_BNS = selector(view)
        hard_BNS = (
            fixed_mask(scores_BNS.detach(), config.kept_groups)
            if config.budget == "per_token"
            else global_mask(scores_BNS.detach(), config.kept_groups, state.routed_BN)
        )
        routed_BN1 = state.routed_BN[..., None]
        state.masks[layer] = hard_BNS | ~routed_BN1
        gate_BNS = state.masks[layer]
        if selector.learned:
            state.balance[layer] = balance_loss(scores_BNS, hard_BNS, state.routed_BN)
            gate_BNS = torch.where(routed_BN1, straight_through(hard_BNS, scores_BNS), 1.0)
        routed_BND = apply_group_mask(value_BND, gate_BNS, self.shape.num_kv_heads, config.layout)
        if not state.apart:
            return routed_BND
        state.values[layer] = routed_BND
        return value_BND


def _masked_mean(hidden_BND: Tensor, mask_BN: Tensor) -> Tensor:
    """Mean over the marked positions, [B, D] in fp32; zeros where none is marked."""
    weight_BN1 = mask_BN[..., None].float()
    return (hidden_BND.float() * weight_BN1).sum(1) / weight_BN1.sum(1).clamp(min=1)
