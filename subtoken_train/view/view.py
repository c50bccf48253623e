"""View: one place of the pass, as a method that drops something sees it.

A place gives what it has; what it lacks, or what a method did not declare, raises when it is read, so that nothing is
silently empty. The places are: before layer 0 (``embeds`` reducers); a cut between decoder layers; a layer of a
prompt's pass (evictions after it, context reducers in it); a layer of a second pass, whose rows (``TaskPlan``) look
back at the prompt's entries; a layer's stored entries while tokens are decoded, oldest first; a value projection (group
selectors). While tokens are decoded, heads that hold entries of their own are rows of the batch, each with one key head
and its query heads.

Legend: B batch (while tokens are decoded: rows, B or B * h), N rows of the place, K keys, Q rows with queries, the last
of the keys (K = N, and Q = N in a prompt's pass; S rows of a task are behind its prompt's: K = N + S, Q = S), H query
heads, h key-value heads, d head width, D model width, W chosen rows.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from subtoken_train.errors import unknown_name
from subtoken_train.functional import causal_attention as causal
from subtoken_train.functional.gather import kept_index, last_marked, take_rows
from subtoken_train.functional.rotary import Rotation
from subtoken_train.kernels.native import received
from subtoken_train.types import Frames, Region

Scope = Literal["context", "all", "visual"]
Rule = Callable[[Tensor], Tensor]  # marks rows by their regions, bool [B, N]
"""``context``: what is VISUAL or CONTEXT (``visual`` is another word for it); ``all``: every entry of the prompt."""
Need = Literal["rows", "blocks", "key_norms", "values", "value_norms", "second_pass", "slopes", "asks", "inputs"]
"""``rows``: attention of a few chosen rows; ``blocks``: all rows of a region, a block at a time; ``values``: the values
themselves; ``value_norms``: both they and their norms; ``second_pass``: the attention that rows which run after the
prompt (``TaskPlan``) pay to its cached entries; ``slopes``: what their outputs change; ``asks``: the rows that ask
about a context (context reducers); ``inputs``: what a layer projects. Keys and queries need no word."""

OF_TASKS: frozenset[Need] = frozenset({"blocks", "value_norms"})
"""Needs that every view of a second pass serves."""

ABSENT: Any = type("ABSENT", (), {})
"""Value of a field that a place does not have."""

_NEEDS: dict[str, Need] = {"value_BhNd": "values", "input_BND": "inputs", "asks_BN": "asks", "asks_counts": "asks"}
_REMEDIES = {
    "query_summary_BD": "set query_conditioned = True in its class",
    "output_norms": "set reads_output = True in its class",
    "query_attention": "name 'attention' in routing features",
}


def reads_values(needs: frozenset[Need]) -> bool:
    """Return whether a method with these needs is given values."""
    return not needs.isdisjoint({"values", "value_norms"})


@dataclass(repr=False, eq=False)
class View:
    """One place of a pass, with what it has and the method declared; reading anything else raises."""

    layer: int = ABSENT  # its number, from 0; of a cut, the first layer that will see what stays
    query_BHNd: Tensor = ABSENT  # rotated queries of the last Q rows of the keys
    key_BhNd: Tensor = ABSENT  # rotated keys, [B, h, K, d]
    value_BhNd: Tensor = ABSENT  # values as they are read (after routing: dropped groups are 0, or what fills them)
    regions_BN: Tensor = ABSENT  # ``Region`` codes of the rows; PADDING: no entry of this layer's cache
    scale: float = ABSENT  # factor of the attention scores
    needs: frozenset[Need] = frozenset()
    in_scope_BN: Tensor = ABSENT  # rows that the scope names, bool; all entries if not given
    position: Tensor = ABSENT  # position ids of the rows, [B, N], or [3, B, N] under mRoPE
    next_position: Tensor = ABSENT  # id of the first token after the prompt, [B, 1] or [3, B, 1]
    rotate: Callable[[Tensor], Rotation] = ABSENT  # what turns queries and keys at given position ids
    output_weight: Callable[[], Tensor] = ABSENT  # weight of the layer's output projection, [D, H * d] in fp32
    carried: Tensor | None = None  # ``Scores.carried`` of these entries from the last look while decoding; 0 since
    attended_BN: Tensor | None = None  # rows that queries could see, bool: the entries, and what a window left behind
    reach: causal.SlidingWindow | None = None  # the window in which rows see each other; None: a row sees all before it
    budget: Callable[[], Tensor] = ABSENT  # entries in scope that may stay, int64 [B], a last row in scope among them
    input_BND: Tensor = ABSENT
    """The normed states that the layer projects to queries, keys and values; while decoding, of the tokens since the
    last look, [B, n, D]."""
    hidden_BND: Tensor = ABSENT
    """States of the rows: input embeddings before layer 0, the output of the layer below at a cut, what ``v_proj`` sees
    for a selector."""
    # of a context reducer
    asks_BN: Tensor = ABSENT  # rows that ask about the context, bool
    scope_counts: Sequence[int] = ABSENT  # rows in scope of each sample, counted once per pass
    asks_counts: Sequence[int] = ABSENT  # rows of each sample that ask
    again: tuple[Tensor, Tensor] | None = None  # what a second pass scored: rows, bool [B, N], and scores, [B, h, N]
    before_BN: Tensor = ABSENT  # regions of what stands before the question and is held; PADDING for the others
    faults: list[Tensor] = ABSENT  # takes whether scores are NaN, a bool each, which is read once the pass has ended
    # of a second pass
    task_BS: Tensor = ABSENT  # rows of the task that are no padding, bool
    about_BN: Tensor = ABSENT  # entries that the task scores, bool
    slope_BS: Tensor = ABSENT  # lengths of gradients, in rows' attention outputs, of their squared last states, fp32
    # while tokens are decoded
    place_BN: Tensor = ABSENT  # number of each entry among all tokens that the layer has seen, from 0
    seen_B: Tensor = ABSENT  # how many those are, int64
    heads: int = 1  # rows of the batch that are heads of one sample
    # before layer 0, and at a cut
    protected_BN: Tensor = ABSENT  # rows that a token is read from, bool; they stay, whatever they score
    rank_position_B: Tensor = ABSENT
    """Index of the row that ranks, the last prompt token of the turn that holds the last image; -1 without an image."""
    sample_seed_B: Tensor = ABSENT  # a number per sample, int64
    scout: Callable[[int], Tensor] = ABSENT  # layer -> head-mean attention of the row that ranks, [B, N] in fp32
    videos: Callable[[], list[list[Frames]]] = ABSENT
    """The tokens of each sample's videos, in order; ``ValueError`` where a sample shows an image."""
    raters_BN: Tensor = ABSENT  # what ``DecoderReducer.raters`` marked, bool
    count_B: Tensor = ABSENT  # visual tokens that stay of each sample, int64
    attention: Callable[[Tensor], Iterator[tuple[Tensor, Tensor]]] = ABSENT  # ``blocks`` of the layer below
    rotary_pull: Callable[[Tensor], Iterator[Tensor]] = ABSENT
    """For the same blocks, [B, W, N] in fp32: the scaled product of a rotated query and key of ones."""
    normed_states: Callable[[], Tensor] = ABSENT  # ``hidden_BND`` after the model's last norm
    # of a selector
    value_groups_BNSg: Tensor = ABSENT  # the projection's output, less what a dropped group reads as, in S groups
    query_summary_BD: Tensor = ABSENT  # mean of ``hidden_BND`` over the query region, if it is ``query_conditioned``
    ordinal_BN: Tensor = ABSENT  # original places of the tokens, int64
    output_norms: Callable[[], Tensor] = ABSENT  # norms of the groups behind ``o_proj``, [B, N, S], if ``reads_output``
    query_attention: Callable[[], Tensor] = ABSENT
    """The attention that the query's rows pay each token, mean over rows and heads, [B, N] in fp32, where
    ``RoutingConfig.features`` names it."""
    num_kv_heads: int = ABSENT  # key-value heads that a value is of
    entries_BN: Tensor = field(init=False)  # rows that are entries of the cache, bool

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            need = _NEEDS.get(name)
            if value is ABSENT or (need is not None and not self._declares(need)):
                delattr(self, name)
        if "regions_BN" in vars(self):
            self.entries_BN = self.regions_BN != int(Region.PADDING)  # a number: a compiler compares no enum
            vars(self).setdefault("in_scope_BN", self.entries_BN)

    def __getattr__(self, name: str) -> Any:
        """Say why a field is not there: called for those alone."""
        if name not in View.__dataclass_fields__:
            raise AttributeError(str(unknown_name("field of a view", name, list(View.__dataclass_fields__))))
        need = _NEEDS.get(name)
        if need is not None and not self._declares(need):
            raise _undeclared(name, need)
        if "seen_B" in vars(self):
            why = f"an eviction reads {name} of its view while tokens are decoded"
            rows = "and says that it reads none: let its online say how many of the last rows (Online(rows=...))"
            none = "where there is none; score without it, or let its online be None, so that eviction_every refuses it"
            raise ValueError(f"{why} {rows}" if name == "query_BHNd" else f"{why}, {none}")
        remedy = _REMEDIES.get(name, f"this place of the pass has {', '.join(vars(self))}")
        raise ValueError(f"a method reads {name} of its view, where there is none: {remedy}")

    def _declares(self, need: Need) -> bool:
        return reads_values(self.needs) if need == "values" else need in self.needs

    def _check_declared(self, thing: str, need: Need) -> None:
        if need not in self.needs:
            raise _undeclared(thing, need)

    def replaced(self, **changes: Any) -> "View":
        """Return a copy with changes; ``dataclasses.replace`` would read what is not there."""
        given = {each.name: vars(self)[each.name] for each in fields(self) if each.init and each.name in vars(self)}
        return View(**given | changes)

    @property
    def visual(self) -> Tensor:
        """Visual tokens, bool [B, N]."""
        return self.regions_BN == Region.VISUAL

    @property
    def ranking(self) -> Tensor:
        """The row that ranks, bool [B, N]; none in a sample without an image."""
        return self._places == self.rank_position_B[:, None]

    @property
    def prompt(self) -> Tensor:
        """Rows up to the one that ranks, bool [B, N]."""
        return self.entries_BN & (self._places <= self.rank_position_B[:, None])

    @property
    def question(self) -> Tensor:
        """Rows of the question up to the one that ranks, bool [B, N]."""
        return self.prompt & (self.regions_BN == Region.QUERY)

    @property
    def _places(self) -> Tensor:
        return torch.arange(self.regions_BN.shape[1], device=self.regions_BN.device)

    @property
    def _first(self) -> int:
        return self.key_BhNd.shape[2] - self.query_BHNd.shape[2]

    def attention_row(self, layer: int) -> Tensor:
        """Return the head-mean attention of a layer's ranking row, [B, N] in fp32; at a cut, of the layer below."""
        if "scout" in vars(self):
            return self.scout(layer)
        assert layer == self.layer - 1
        return causal.attention_paid(self.blocks(self.ranking))

    def rows(self, index_BW: Tensor, keys_BN: Tensor | None = None) -> Tensor:
        """Return the attention of chosen rows, see ``attention_rows``, over all they see or over ``keys_BN`` alone."""
        self._check_declared("rows()", "rows")
        index_BW = torch.where(index_BW < self._first, -1, index_BW - self._first) if self._first else index_BW
        states = self.query_BHNd, self.key_BhNd, index_BW, self._visible(keys_BN), self.scale
        return causal.attention_rows(*states, self._first, self.reach)

    def blocks(
        self, rows_BN: Tensor, keys_BN: Tensor | None = None, among: Rule | int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the attention of all marked rows, one block at a time, see ``attention_blocks``."""
        if "attention" in vars(self):
            return self.attention(rows_BN)
        first, found = self._first, causal.attention_blocks(*self._asking(rows_BN, keys_BN), most=self._most(among))
        return ((torch.where(index_BW < 0, -1, index_BW + first), rows_BHWN) for index_BW, rows_BHWN in found)

    def received(
        self,
        rows_BN: Tensor | None = None,
        keys_BN: Tensor | None = None,
        weight_BN: Tensor | None = None,
        largest: bool = False,
        among: Rule | int | None = None,
    ) -> Tensor:
        """Return the attention that each entry receives from all marked rows, [B, H, N], see ``attention_received``."""
        weight_BN, most = None if weight_BN is None else weight_BN[:, self._first :], self._most(among)
        received_BHK = received(*self._asking(rows_BN, keys_BN), weight_BN=weight_BN, largest=largest, most=most)
        return received_BHK[..., : self.regions_BN.shape[1]]

    def _most(self, among: Rule | int | None) -> int | None:
        """Return how many rows a sample marks at most, by a rule that marks them or more; counted for all layers."""
        return among if among is None or isinstance(among, int) else max(map(len, self.places(among)))

    def places(self, rule: Rule | None = None) -> list[Tensor]:
        """Return where a rule (None: all entries) marks each sample's rows, ascending, int64 [n]; read once a pass."""
        found = _places.setdefault(self.regions_BN, {})
        if rule not in found:
            marks_BN = self.entries_BN if rule is None else rule(self.regions_BN)
            order_BN = marks_BN.int().sort(dim=-1, descending=True, stable=True).indices
            found[rule] = [row_N[:count] for row_N, count in zip(order_BN, marks_BN.sum(-1).tolist(), strict=True)]
        return found[rule]

    def _asking(
        self, rows_BN: Tensor | None, keys_BN: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, float, int, causal.SlidingWindow | None]:
        self._check_declared("the attention of all rows", "blocks")
        keys_BK = self._visible(keys_BN)
        if rows_BN is None:
            rows_BQ, keys_BK = self.task_BS, torch.cat([keys_BK, self.task_BS], 1)
        else:
            rows_BQ = rows_BN[:, self._first :]
        return self.query_BHNd, self.key_BhNd, rows_BQ, keys_BK, self.scale, self._first, self.reach

    def _visible(self, keys_BN: Tensor | None) -> Tensor:
        found = self.attended_BN if keys_BN is None else keys_BN
        return self.entries_BN if found is None else found

    def key_norms(self) -> Tensor:
        """Return the Euclidean norms of the keys, [B, h, N] in fp32."""
        self._check_declared("key_norms()", "key_norms")
        norms: Tensor = self.key_BhNd.float().norm(dim=-1)
        return norms

    def value_norms(self) -> Tensor:
        """Return the Euclidean norms of the cached values, [B, h, N] in fp32."""
        self._check_declared("value_norms()", "value_norms")
        norms: Tensor = self.value_BhNd.float().norm(dim=-1)
        return norms

    def unrotated_queries(self) -> Tensor:
        """Return the queries as they were before the rotary embedding, [B, H, N, d] in fp32."""
        return self.rotate(self.position).turn_back(self.query_BHNd)

    def unrotated_keys(self) -> Tensor:
        """Return the keys as they were before the rotary embedding, [B, h, N, d] in fp32."""
        return self.rotate(self.position).turn_back(self.key_BhNd)

    def viewers(self) -> Tensor:
        """Count the rows that can see each entry, int64 [B, N]; while tokens are decoded, all that came after it."""
        if "seen_B" in vars(self):
            return self.seen_B[:, None] - self.place_BN
        return self.entries_BN.flip(-1).cumsum(-1).flip(-1)

    def head_mean(self, scores_BhN: Tensor) -> Tensor:
        """Average a token's scores over its sample's key-value heads; a head that dropped the token counts 0."""
        if self.heads == 1:
            return scores_BhN.mean(1, keepdim=True)
        by_sample = (len(scores_BhN) // self.heads, -1)
        place_BM = self.place_BN.masked_fill(~self.entries_BN, 0).reshape(by_sample)
        scores_BM = scores_BhN.masked_fill(~self.entries_BN[:, None], 0.0).reshape(by_sample)
        total_BP = scores_BM.new_zeros(len(place_BM), int(self.seen_B.max())).scatter_add(1, place_BM, scores_BM)
        return total_BP.gather(1, place_BM).view_as(scores_BhN) / self.heads

    def window(self, count: int | Tensor) -> Tensor:
        """Mark the last ``count`` entries (a number, or [B, 1]), bool [B, N]; of those after the scope, if any."""
        following_BN = self.entries_BN & (self.in_scope_BN.flip(-1).cumsum(-1).flip(-1) == 0)
        return last_marked(torch.where(following_BN.any(-1, keepdim=True), following_BN, self.entries_BN), count)

    def last_rows(self, window: int) -> Tensor:
        """Index the last ``window`` entries of every sample, ascending, [B, W]; -1 pads samples with fewer."""
        order_BN = self.entries_BN.int().sort(dim=-1, descending=True, stable=True).indices
        slot_BW = self.entries_BN.sum(-1, keepdim=True) - window + torch.arange(window, device=order_BN.device)
        return order_BN.gather(1, slot_BW.clamp(min=0)).masked_fill(slot_BW < 0, -1)

    def among(self, entries_BN: Tensor, most: int | None = None) -> "tuple[View, Tensor]":
        """Return a view of some entries alone, ``most`` of a sample, and their places, int64 [B, C]; padding has 0."""
        length, reach = self.regions_BN.shape[1], self.reach
        longest = None if most is None or entries_BN.device.type not in causal.DEVICES else min(most, length)
        index_BC, valid_BC = kept_index(entries_BN & self.entries_BN, False, longest)
        states = self.key_BhNd, self.value_BhNd
        keys, values = (take_rows(each.transpose(1, 2), index_BC).transpose(1, 2) for each in states)
        regions_BC, about_BC = (take_rows(x, index_BC) for x in (self.regions_BN, self.about_BN))
        if reach is not None:
            position_BN, position_BS = reach.position_BN[:, :length], reach.position_BN[:, length:]
            reach = causal.SlidingWindow(reach.size, torch.cat([take_rows(position_BN, index_BC), position_BS], 1))
        chosen = self.replaced(
            key_BhNd=torch.cat([keys, self.key_BhNd[:, :, length:]], 2),
            value_BhNd=values,
            regions_BN=regions_BC.masked_fill(~valid_BC, Region.PADDING),
            in_scope_BN=ABSENT,
            about_BN=about_BC & valid_BC,
            reach=reach,
        )
        return chosen, index_BC


for _each in fields(View):
    if _each.default is ABSENT:
        delattr(View, _each.name)  # what a place lacks is then read by __getattr__

_places: MutableMapping[Tensor, dict[Rule | None, list[Tensor]]] = WeakTensorKeyDictionary()
"""By the regions of some rows, which all layers that ran on them share: what ``View.places`` found."""

LayerView = TaskView = OnlineView = View
"""Names of earlier versions, by which methods written for them import it."""


def _undeclared(thing: str, need: Need) -> ValueError:
    words = f"an eviction reads {thing} of its view and did not ask for it"
    return ValueError(f"{words}: add {need!r} to the method's needs (Eviction.needs)")


@dataclass(frozen=True)
class Online:
    """Rows that a method reads while tokens are decoded: the last ``rows`` since the last eviction; None: all."""

    rows: int | None = None


@dataclass(frozen=True)
class Opening:
    """The end of a question and the opening of its answer, by the chat template; ``otherwise`` without one."""

    otherwise: str


@dataclass(frozen=True)
class TaskPlan:
    """One task of a second pass.

    ``pieces`` are its rows: a text, the opening of an answer, or marked tokens of the prompt again (bool [B, N]); None:
    the whole prompt again. ``about_BN`` marks the tokens whose entries it scores; None: all.
    """

    pieces: tuple[str | Opening | Tensor, ...] | None = None
    about_BN: Tensor | None = None
