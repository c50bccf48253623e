"""View: one place of the pass, as a method that drops something sees it.

A method declares in ``needs`` what it reads; reading anything else raises. The place is a layer of a prompt's pass
(``View``: evictions, and context reducers while the prompt is read), of a second pass (``TaskView``, whose rows a
``TaskPlan`` asks for), or of the stored entries while tokens are decoded (``OnlineView``).

``engine/second_pass.py`` makes the rows of a second pass, from a text by the family's tokenizer and from tokens of
the prompt by the embeddings that they had (an image's features among them). While tokens are decoded, heads that hold
entries of their own are rows of the batch: a row is then one head of one sample, with one key head and its query heads.
Heads that share their entries stay together, and a row is a sample.

Legend: B batch, N cached rows of the prompt, S rows of a task, K = N + S, H query heads, h key-value heads, d head
width, R rows while tokens are decoded (B, or B * h), W chosen rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from subtoken_train.functional.attention_statistics import attention_blocks, attention_rows
from subtoken_train.functional.causal_attention import SlidingWindow
from subtoken_train.functional.gather import kept_index, last_marked, take_rows
from subtoken_train.functional.rotary import Rotation
from subtoken_train.types import Region

Scope = Literal["context", "all", "visual"]
"""``context``: what is VISUAL or CONTEXT (``visual`` is another word for it); ``all``: every entry of the prompt."""
Need = Literal["rows", "blocks", "key_norms", "values", "value_norms", "second_pass", "asks", "inputs"]
"""``rows``: attention of a few chosen rows; ``blocks``: all rows of a region, a block at a time; ``values``: the values
themselves; ``value_norms``: both they and their norms; ``second_pass``: the attention that rows which run after the
prompt (``TaskPlan``) pay to its cached entries; ``asks``: the rows that ask about a context (context reducers);
``inputs``: what a layer projects to queries, keys and values. Keys and queries need no word."""


def undeclared(thing: str, need: Need) -> ValueError:
    """Return the error for what a method reads of a view without having asked for it."""
    return ValueError(
        f"an eviction reads {thing} of its view and did not ask for it: add {need!r} to the method's needs "
        "(Eviction.needs)"
    )


@dataclass
class View:
    """One layer of a prompt's pass, with what the method declared; anything else raises.

    Attributes:
        layer: its number, from 0.
        query_BHNd: rotated queries.
        key_BhNd: rotated keys.
        value_BhNd: values as they are read (after routing: dropped groups are 0, or what fills them).
        regions_BN: ``Region`` codes of the rows; PADDING marks what is no entry of this layer's cache.
        scale: factor of the attention scores.
        needs: what the method declared.
        in_scope_BN: rows that the scope names, bool; None: all entries.
        position: position ids of the rows, [B, N], or [3, B, N] under mRoPE.
        next_position: id of the first token after the prompt, [B, 1] or [3, B, 1].
        rotate: what turns queries and keys at given position ids.
        carried: ``Scores.carried`` of these entries from the last time that the method saw them, while tokens are
            decoded; 0 for entries since.
        output_weight: gives the weight of the layer's output projection, [D, H * d] in fp32.
        attended_BN: rows that queries could see, bool: more than the entries where a window left some behind; None: the
            entries.
        reach: the window in which rows see each other; None: a row sees all before it.
        budget: gives the entries in scope that may stay, int64 [B]; a last row that is in scope is one of them.
        asks_BN: rows that ask about the context, bool; of a context reducer, like the two counts.
        scope_counts: rows in scope of each sample; counted once per pass, so that no layer waits for the device.
        asks_counts: rows of each sample that ask.
        again: of a context reducer, what a second pass scored: the rows, bool [B, N], and their scores, [B, h, N].
        input_BND: the normed states that the layer projects to queries, keys and values, of an eviction that declared
            ``inputs``; while tokens are decoded, of the tokens since the last look alone, [B, n, D].
        entries_BN: rows that are entries of the cache, bool.
    """

    layer: int
    query_BHNd: Tensor
    key_BhNd: Tensor
    value_BhNd: Tensor = field(repr=False)
    regions_BN: Tensor
    scale: float
    needs: frozenset[Need]
    in_scope_BN: Tensor | None = None
    position: Tensor | None = None
    next_position: Tensor | None = None
    rotate: Callable[[Tensor], Rotation] | None = None
    output_weight: Callable[[], Tensor] | None = None
    carried: Tensor | None = None
    attended_BN: Tensor | None = None
    reach: SlidingWindow | None = None
    budget: Callable[[], Tensor] | None = None
    asks_BN: Tensor | None = field(default=None, repr=False)
    scope_counts: Sequence[int] = ()
    asks_counts: Sequence[int] = field(default=(), repr=False)
    again: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    input_BND: Tensor | None = field(default=None, repr=False)
    entries_BN: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.entries_BN = self.regions_BN != Region.PADDING
        if self.in_scope_BN is None:
            self.in_scope_BN = self.entries_BN
        if self.attended_BN is None:
            self.attended_BN = self.entries_BN

    def __getattribute__(self, name: str) -> Any:
        """Read an attribute; values, inputs and asking rows that were not declared raise a worded ``ValueError``."""
        if name == "value_BhNd" and not self.reads_values(self.needs):
            raise undeclared(name, "values")
        if name in ("asks_BN", "asks_counts"):
            self.check_declared(name, "asks")
        if name == "input_BND":
            self.check_declared(name, "inputs")
        return super().__getattribute__(name)

    def replaced(self, **changes: Any) -> View:
        """Return a copy with changes; ``dataclasses.replace`` would read what was not declared."""
        given = {each.name: vars(self)[each.name] for each in fields(self) if each.init}
        return View(**given | changes)

    @staticmethod
    def reads_values(needs: frozenset[Need]) -> bool:
        """Return whether a method with these needs is given values."""
        return not needs.isdisjoint({"values", "value_norms"})

    def check_declared(self, thing: str, need: Need) -> None:
        """Raise a worded ``ValueError`` unless the method asked for it."""
        if need not in self.needs:
            raise undeclared(thing, need)

    def rows(self, index_BW: Tensor, keys_BN: Tensor | None = None) -> Tensor:
        """Attention of chosen rows, see ``attention_rows``; over all they see unless ``keys_BN`` says otherwise."""
        self.check_declared("rows()", "rows")
        keys_BN = self.attended_BN if keys_BN is None else keys_BN
        assert keys_BN is not None
        return attention_rows(self.query_BHNd, self.key_BhNd, index_BW, keys_BN, self.scale, window=self.reach)

    def blocks(self, rows_BN: Tensor, keys_BN: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Attention of all marked rows, a block at a time, see ``attention_blocks``."""
        self.check_declared("blocks()", "blocks")
        keys_BN = self.attended_BN if keys_BN is None else keys_BN
        assert keys_BN is not None
        return attention_blocks(self.query_BHNd, self.key_BhNd, rows_BN, keys_BN, self.scale, window=self.reach)

    def key_norms(self) -> Tensor:
        """Euclidean norms of the keys, [B, h, N] in fp32."""
        self.check_declared("key_norms()", "key_norms")
        norms: Tensor = self.key_BhNd.float().norm(dim=-1)
        return norms

    def value_norms(self) -> Tensor:
        """Euclidean norms of the cached values, [B, h, N] in fp32."""
        self.check_declared("value_norms()", "value_norms")
        norms: Tensor = self.value_BhNd.float().norm(dim=-1)
        return norms

    def unrotated_queries(self) -> Tensor:
        """Queries as they were before the rotary embedding, [B, H, N, d] in fp32."""
        return self._rotation().turn_back(self.query_BHNd)

    def unrotated_keys(self) -> Tensor:
        """Keys likewise, [B, h, N, d] in fp32."""
        return self._rotation().turn_back(self.key_BhNd)

    def _rotation(self) -> Rotation:
        assert self.rotate is not None
        assert self.position is not None
        return self.rotate(self.position)

    def viewers(self) -> Tensor:
        """Count the rows that can see each entry, int64 [B, N]."""
        return self.entries_BN.flip(-1).cumsum(-1).flip(-1)

    def head_mean(self, scores_BhN: Tensor) -> Tensor:
        """Mean of an entry's scores over the key-value heads, broadcast over them."""
        return scores_BhN.mean(1, keepdim=True)

    def window(self, count: int | Tensor) -> Tensor:
        """An observation window: the last ``count`` entries of the prompt (a number, or [B, 1]), bool [B, N].

        Where anything follows what is in scope, the window does not reach into that: what follows stays anyway, so the
        window costs nothing of the budget.
        """
        assert self.in_scope_BN is not None
        following_BN = self.entries_BN & (self.in_scope_BN.flip(-1).cumsum(-1).flip(-1) == 0)
        rows_BN = torch.where(following_BN.any(-1, keepdim=True), following_BN, self.entries_BN)
        return last_marked(rows_BN, count)

    def last_rows(self, window: int) -> Tensor:
        """Index of the last ``window`` entries of every sample, ascending, [B, W]; -1 pads samples with fewer."""
        count_B1 = self.entries_BN.sum(-1, keepdim=True)
        order_BN = self.entries_BN.int().sort(dim=-1, descending=True, stable=True).indices
        slot_BW = count_B1 - window + torch.arange(window, device=order_BN.device)
        index_BW = order_BN.gather(1, slot_BW.clamp(min=0))
        return index_BW.masked_fill(slot_BW < 0, -1)


LayerView = View
"""The name up to version 0.2, by which methods written for it import it."""


@dataclass
class TaskView:
    """One layer of a second pass, as an eviction method sees it: a task's rows look back at a prompt's entries.

    Attributes:
        layer: its number, from 0.
        query_BHSd: rotated queries of the task.
        key_BhKd: rotated keys of the prompt's rows, then of the task's.
        value_BhNd: values as they are cached, of the prompt.
        regions_BN: as in ``View``, of the prompt.
        rows_BS: rows of the task that are no padding, bool.
        scale: factor of the attention scores.
        about_BN: entries that the task scores, bool.
        reach: the window in which rows see each other: the prompt's, then the task's; None: all before them.
    """

    layer: int
    query_BHSd: Tensor
    key_BhKd: Tensor
    value_BhNd: Tensor
    regions_BN: Tensor
    rows_BS: Tensor
    scale: float
    about_BN: Tensor
    reach: SlidingWindow | None = None

    def among(self, entries_BN: Tensor) -> tuple[TaskView, Tensor]:
        """The task looking at some of the prompt's entries alone, and their places, int64 [B, C].

        Where a sample has fewer, places are 0 and the view's rows are padding.
        """
        length = self.regions_BN.shape[1]
        index_BC, valid_BC = kept_index(entries_BN & (self.regions_BN != Region.PADDING), pad_left=False)
        keys, values = (
            take_rows(x.transpose(1, 2), index_BC).transpose(1, 2) for x in (self.key_BhKd, self.value_BhNd)
        )
        regions_BC, about_BC = (take_rows(x, index_BC) for x in (self.regions_BN, self.about_BN))
        reach = self.reach
        if reach is not None:
            position_BN, position_BS = reach.position_BN[:, :length], reach.position_BN[:, length:]
            reach = SlidingWindow(reach.size, torch.cat([take_rows(position_BN, index_BC), position_BS], 1))
        chosen = replace(
            self,
            key_BhKd=torch.cat([keys, self.key_BhKd[:, :, length:]], 2),
            value_BhNd=values,
            regions_BN=regions_BC.masked_fill(~valid_BC, Region.PADDING),
            about_BN=about_BC & valid_BC,
            reach=reach,
        )
        return chosen, index_BC

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Attention that the task's rows pay to the prompt's, as ``View.blocks`` yields it.

        A row's softmax runs over the prompt's entries and the task's rows up to itself; the columns of the latter are
        left out, so that a row sums to less than 1.
        """
        length = self.regions_BN.shape[1]
        keys_BK = torch.cat([self.regions_BN != Region.PADDING, self.rows_BS], 1)
        for index_BW, probability_BHWK in attention_blocks(
            self.query_BHSd, self.key_BhKd, self.rows_BS, keys_BK, self.scale, offset=length, window=self.reach
        ):
            yield index_BW, probability_BHWK[..., :length]

    def value_norms(self) -> Tensor:
        """Euclidean norms of the prompt's cached values, [B, h, N] in fp32."""
        norms: Tensor = self.value_BhNd.float().norm(dim=-1)
        return norms


_OF_PROMPTS = frozenset({"position", "next_position", "rotate", "output_weight"})
"""Fields of a ``View`` that only a prompt's rows have."""


@dataclass(frozen=True)
class Online:
    """Rows that a method reads when it evicts while tokens are decoded.

    Attributes:
        rows: last query rows that it reads, at most those since the last eviction; None: all of these.
    """

    rows: int | None = None


@dataclass
class OnlineView(View):
    """A ``View`` whose entries are all that a layer holds, oldest first, and whose queries are those of the last.

    Attributes:
        place_RN: number of each entry among all tokens that the layer has seen of its sample, from 0; padding: any.
        seen_R: how many those are, int64.
        heads: rows of the batch that are heads of one sample.
    """

    place_RN: Tensor = field(kw_only=True)
    seen_R: Tensor = field(kw_only=True)
    heads: int = field(kw_only=True)

    def __getattribute__(self, name: str) -> Any:
        """Read an attribute; what only a prompt's pass has raises a worded ``ValueError``."""
        found = super().__getattribute__(name)
        if found is None and name in _OF_PROMPTS:
            raise ValueError(
                f"an eviction reads {name} of its view while tokens are decoded, where there is none; score without "
                "it, or let its online be None, so that eviction_every refuses the method"
            )
        if name == "query_BHNd" and not found.shape[2]:
            raise ValueError(
                "an eviction reads queries while tokens are decoded and says that it reads none: let its online say "
                "how many of the last rows (Online(rows=...))"
            )
        return found

    @property
    def _first(self) -> int:
        """Entries before the first query row."""
        return self.key_BhNd.shape[2] - self.query_BHNd.shape[2]

    def rows(self, index_BW: Tensor, keys_BN: Tensor | None = None) -> Tensor:
        self.check_declared("rows()", "rows")
        index_BW = torch.where(index_BW < self._first, -1, index_BW - self._first)
        keys_BN = self.entries_BN if keys_BN is None else keys_BN
        return attention_rows(self.query_BHNd, self.key_BhNd, index_BW, keys_BN, self.scale, self._first)

    def blocks(self, rows_BN: Tensor, keys_BN: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        self.check_declared("blocks()", "blocks")
        keys_BN = self.entries_BN if keys_BN is None else keys_BN
        chosen_BN = rows_BN[:, self._first :]
        for index_BW, probability_BHWN in attention_blocks(
            self.query_BHNd, self.key_BhNd, chosen_BN, keys_BN, self.scale, offset=self._first
        ):
            yield torch.where(index_BW < 0, -1, index_BW + self._first), probability_BHWN

    def viewers(self) -> Tensor:
        return self.seen_R[:, None] - self.place_RN

    def head_mean(self, scores_BhN: Tensor) -> Tensor:
        if self.heads == 1:
            return super().head_mean(scores_BhN)
        by_sample = (len(scores_BhN) // self.heads, -1)
        place_BM = self.place_RN.masked_fill(~self.entries_BN, 0).reshape(by_sample)
        scores_BM = scores_BhN.masked_fill(~self.entries_BN[:, None], 0.0).reshape(by_sample)
        total_BP = scores_BM.new_zeros(len(place_BM), int(self.seen_R.max())).scatter_add(1, place_BM, scores_BM)
        return total_BP.gather(1, place_BM).view_as(scores_BhN) / self.heads


@dataclass(frozen=True)
class Opening:
    """The end of a question and the opening of its answer, in the words of the chat template that the prompt is in.

    Attributes:
        otherwise: the text after a prompt that is written in none.
    """

    otherwise: str


@dataclass(frozen=True)
class TaskPlan:
    """One task.

    Attributes:
        pieces: its rows, in order: a text, the opening of an answer, or marked tokens of the prompt again (bool [B, N];
            those that the token reducer left). None: the whole prompt again, as it stands.
        about_BN: tokens of the prompt whose entries it scores, bool; None: all of them.
    """

    pieces: tuple[str | Opening | Tensor, ...] | None = None
    about_BN: Tensor | None = None
