"""The rows that run through the decoder layers, what a pass over a batch leaves behind, and checks that it is finite.

Legend: B batch, N positions before the reducer, M positions after it, D model width, V vocabulary, n layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from subtoken_train.errors import no_numbers
from subtoken_train.functional.causal_attention import in_window
from subtoken_train.functional.gather import count_positions, kept_index, take_rows
from subtoken_train.functional.merging import joined_means
from subtoken_train.reducers.base import PositionPolicy
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RoutingState
from subtoken_train.types import Batch, LayerPlan, Plan, Region


def protected_rows(batch: Batch) -> Tensor:
    """Mark rows that no reducer drops, bool [B, N]: a token is read from them (before an answer, at a prompt's end)."""
    regions_BN = batch.regions_BN
    after_BN = torch.nn.functional.pad(regions_BN[:, 1:], (0, 1), value=int(Region.PADDING))
    answers_BN = (after_BN == Region.ANSWER) & (regions_BN != Region.ANSWER)
    ends_BN = (after_BN == Region.PADDING) & (not batch.followed)
    return (regions_BN != Region.PADDING) & (answers_BN | ends_BN)


@dataclass
class Rows:
    """The rows that run through a span of layers."""

    index_BM: Tensor  # row of the unreduced sequence each one came from; 0 where it is not visible
    visible_BM: Tensor
    position: Tensor  # position ids for the rotary embedding, [B, M], or [3, B, M] (time, height, width) under mRoPE
    ordinal_BM: Tensor  # real tokens before it in the unreduced sequence; does not depend on the padding side
    regions_BM: Tensor
    next_position: Tensor
    """The first token's after the prompt, [B, 1] or [3, B, 1]: one past the largest, whatever was dropped since."""
    deep_nBMD: Tensor | None = None
    """Added to the outputs of the first n layers (visual features of their own); None for most models."""
    attended_BM: Tensor | None = None
    """Rows of one layer that others could see, once a window made some of them no entries, bool."""

    @classmethod
    def whole(cls, regions_BN: Tensor, position: Tensor, deep_nBND: Tensor | None = None) -> Self:
        """Return the rows of an unreduced sequence."""
        visible_BN = regions_BN != Region.PADDING
        index_BN = torch.arange(visible_BN.shape[1], device=visible_BN.device).expand(visible_BN.shape)
        following = one_past(position, visible_BN)
        return cls(index_BN, visible_BN, position, count_positions(visible_BN), regions_BN, following, deep_nBND)

    def take(self, keep_BM: Tensor, pad_left: bool, policy: PositionPolicy = "original") -> "tuple[Rows, Tensor]":
        """Return the kept rows and the index that gathers others alike; ``renumber``: positions count anew."""
        index, valid = kept_index(keep_BM, pad_left)
        regions = take_rows(self.regions_BM, index).masked_fill(~valid, Region.PADDING)
        if policy == "renumber":
            position = count_positions(valid)
            following = one_past(position, valid)
        else:
            position = self.position.gather(-1, index.expand(*self.position.shape[:-1], -1))
            following = self.next_position
        ordinal = take_rows(self.ordinal_BM, index)
        deep = None if self.deep_nBMD is None else torch.stack([take_rows(each, index) for each in self.deep_nBMD])
        return Rows(take_rows(self.index_BM, index), valid, position, ordinal, regions, following, deep), index

    def followed_by(self, later: "Rows") -> "Rows":
        """Return the rows with others behind them; what the first layers add is no longer at hand."""
        names = "index_BM", "visible_BM", "position", "ordinal_BM", "regions_BM"
        joined = {name: torch.cat([getattr(rows, name) for rows in (self, later)], -1) for name in names}
        return replace(self, **joined, deep_nBMD=None)

    @cached_property
    def unpadded(self) -> bool:
        """True if no row is padding; read from the device once."""
        return bool(self.visible_BM.all())

    def in_window(self, size: int | None) -> Self:
        """Return the rows as a layer with a window of ``size`` holds them (None: no window)."""
        if size is None:
            return self
        left_BM = ~in_window(self.next_position, self.position, size)[:, 0]
        attended_BM = self.regions_BM != Region.PADDING
        return replace(self, regions_BM=self.regions_BM.masked_fill(left_BM, Region.PADDING), attended_BM=attended_BM)


def joined_rows(hidden_BND: Tensor, rows: Rows, joins_BN: Tensor) -> tuple[Tensor, Rows]:
    """Return embeddings, and what the first layers add, each the mean of the rows that go to its row."""
    goes_B1N, deep = joins_BN[:, None].to(hidden_BND.device), rows.deep_nBMD
    if deep is not None:
        deep = torch.stack([joined_means(each[:, None], goes_B1N.to(each.device))[:, 0] for each in deep])
    return joined_means(hidden_BND[:, None], goes_B1N)[:, 0], replace(rows, deep_nBMD=deep)


def one_past(position: Tensor, visible_BN: Tensor) -> Tensor:
    """Return one past each sample's largest position id (mRoPE: of all three axes), [B, 1] or [3, B, 1]."""
    largest = position.masked_fill(~visible_BN, -1).amax(-1, keepdim=True)
    return (largest if largest.dim() == 2 else largest.amax(0, keepdim=True).expand_as(largest)) + 1


def question_rows(batch: Batch, rows: Rows) -> Tensor:
    """Mark the QUERY rows up to ``Batch.rank_position_B``, bool [B, M]: the question that choices may depend on."""
    return (rows.regions_BM == Region.QUERY) & (rows.index_BM <= batch.rank_position_B[:, None])


def layer_plan(
    keep_BhM: Tensor, groups_BMS: Tensor | None = None, index_BM: Tensor | None = None, longest: int | None = None
) -> LayerPlan:
    """Plan a layer from kept entries (bool, [B, 1, M]: all heads alike); ``longest``: the most of a sample."""
    rows, valid = kept_index(keep_BhM.any(1), pad_left=False, longest=longest)
    entries = (rows if index_BM is None else take_rows(index_BM, rows)).masked_fill(~valid, -1)
    heads = None if keep_BhM.shape[1] == 1 else take_rows(keep_BhM.transpose(1, 2), rows) & valid[..., None]
    return LayerPlan(entries, None if groups_BMS is None else take_rows(groups_BMS, rows), heads, rows)


def layer_plans(
    keep: Sequence[Tensor], groups: Mapping[int, Tensor], indices: Sequence[Tensor | None]
) -> list[LayerPlan]:
    """Return the plans of all layers; the device is read once."""
    alike = [(id(marks), id(index)) for marks, index in zip(keep, indices, strict=True)]
    first = {pair: layer for layer, pair in reversed(list(enumerate(alike)))}
    longest = torch.stack([keep[layer].any(1).sum(-1).max() for layer in first.values()]).tolist()
    most = dict(zip(first, longest, strict=True))
    made = {pair: layer_plan(keep[layer], None, indices[layer], most[pair]) for pair, layer in first.items()}
    plans = [replace(made[pair]) for pair in alike]
    for layer, groups_BMS in groups.items():
        rows_BN = plans[layer].rows_BN
        assert rows_BN is not None
        plans[layer].group_mask_BNS = take_rows(groups_BMS, rows_BN)
    return plans


@dataclass
class PromptPass:
    """The results of a pass over a batch."""

    hidden_BMD: Tensor  # last layer's output, before the final norm
    rows: Rows
    spans: list[tuple[int, int, Rows]] = field(default_factory=list)  # (first layer, last + 1, rows) of each stretch
    state: RoutingState | None = None  # notes of the routers; None without routing
    routing: RoutingConfig | None = None  # settings of the routing that acted; None where every group stays as it is
    kept: dict[int, Tensor] = field(default_factory=dict)
    """Under a context reducer, per layer the rows that later rows see, bool [B, M]."""
    embeds_BND: Tensor | None = None
    """Input embeddings of the unreduced sequence; after a tower's reducer its features, merged where it merges."""
    windows: list[int | None] = field(default_factory=list)  # every layer's; empty: none has one

    def layer_rows(self) -> list[tuple[Rows, Tensor]]:
        """Return each layer's rows, and the regions of those that its cache holds, [B, M]; PADDING for the others."""
        spread = [(layer, rows) for start, stop, rows in self.spans for layer in range(start, stop)]
        if any(self.windows):
            spread = [(layer, rows.in_window(self.windows[layer])) for layer, rows in spread]
        if not self.kept:
            return [(rows, rows.regions_BM) for _, rows in spread]
        seen = [(rows, self.kept[layer]) for layer, rows in spread]  # of one tensor for all that see the same: one plan
        left = {id(marks): rows.regions_BM.masked_fill(~marks, Region.PADDING) for rows, marks in seen}
        return [(rows, left[id(marks)]) for rows, marks in seen]

    def plan(self, keep: list[Tensor] | None = None) -> Plan:
        """Plan the entries and value groups that every layer's cache holds after this pass."""
        masks, held = self.groups(), self.layer_rows()
        layers = layer_plans(self.entries() if keep is None else keep, masks, [rows.index_BM for rows, _ in held])
        stored = self.routing is not None and self.routing.token_budget.stores_fill
        for layer, kept_layer in enumerate(layers):
            kept_layer.filled = stored and layer in masks
        return Plan(layers) if self.routing is None else Plan(layers, self.routing.layout)

    def entries(self) -> list[Tensor]:
        """Return each layer's entries that reducer and routers leave, bool [B, h, M] (h = 1: one set for all)."""
        keys = {} if self.state is None or self.routing is None else self.state.keys
        regions = [regions_BM for _, regions_BM in self.layer_rows()]
        real = {id(regions_BM): (regions_BM != Region.PADDING)[:, None] for regions_BM in regions}
        kept = [real[id(regions_BM)] for regions_BM in regions]  # one tensor for the layers of a stretch
        return [entries & keys[layer] if layer in keys else entries for layer, entries in enumerate(kept)]

    def groups(self) -> dict[int, Tensor]:
        """Return the kept value groups of the layers that cut values, by layer, bool [B, M, S]."""
        state = self.state
        if state is None or self.routing is None:
            return {}
        return {layer: mask_BMS for layer in state.masks if (mask_BMS := state.groups(layer)) is not None}

    def fills(self) -> dict[int, Tensor]:
        """Return the vectors that dropped groups read as, by layer."""
        return {} if self.state is None or self.routing is None else self.state.fills

    def labels(self, labels_BN: Tensor) -> Tensor:
        """Return the labels of the rows that are left, [B, M]; padding gets -100."""
        return take_rows(labels_BN, self.rows.index_BM).masked_fill(~self.rows.visible_BM, -100)


def are_finite(tensor: Tensor) -> Tensor:
    """Return whether a tensor holds neither NaN nor infinity, a scalar bool on its device; an empty one does not."""
    if not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    low, high = tensor.aminmax()  # NaN where any number is
    return low.isfinite() & high.isfinite()


@torch.no_grad()
def check_states(hidden_BMD: Tensor, visible_BM: Tensor, names: Sequence[str]) -> None:
    """Raise a worded ``ValueError`` where real rows of a pass hold NaN or infinity; the device is read once."""
    low_BM, high_BM = hidden_BMD.aminmax(dim=-1)
    broken_B = (~(low_BM.isfinite() & high_BM.isfinite()) & visible_BM.to(low_BM.device)).any(-1)
    _raise_first(broken_B, names, hidden_BMD.dtype)


def broken_rows(logits_BV: Tensor) -> Tensor:
    """Return the rows whose logits choose no token, bool [B]: NaN or +inf among them, or all -inf."""
    return ~logits_BV.amax(-1).isfinite()


@torch.no_grad()
def check_logits(logits_BV: Tensor, names: Sequence[str]) -> None:
    """Raise a worded ``ValueError`` where a sample's logits are ``broken_rows``; the device is read once."""
    _raise_first(broken_rows(logits_BV), names, logits_BV.dtype)


def _raise_first(broken_B: Tensor, names: Sequence[str], dtype: torch.dtype) -> None:
    marks = broken_B.tolist()
    if any(marks):
        raise no_numbers(f"for {names[marks.index(True)][:80]!r}", dtype)
