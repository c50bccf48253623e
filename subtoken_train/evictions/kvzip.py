"""Methods by a second pass over the context: KVCompose, KVzip and KVgrad; KVzap, whose nets foretell KVzip's scores.

Legend: B batch, N positions or cached rows of the prompt, n tokens since the last look, C entries that a task looks at,
R rows while tokens are decoded, D model width, W width between the layers of a net, H query heads, h key-value heads, c
key heads of a row, L layers; of a gate G queries of a head, s sinks, d width of both.
"""

import base64
import binascii
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from subtoken_train.calibrations import CalibratedNumbers
from subtoken_train.errors import check_range, refuse
from subtoken_train.evictions import budgets
from subtoken_train.evictions.base import Eviction
from subtoken_train.evictions.budgets import Pool, competing_counts, counts_of_pool, protected_first
from subtoken_train.evictions.observers import over_groups, task_rows, unasked
from subtoken_train.types import Region, in_compressed_region
from subtoken_train.view.method import by_settings, setting
from subtoken_train.view.scores import Candidates, Scale, Scores
from subtoken_train.view.view import Need, Online, Opening, TaskPlan, View

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
ANSWER = Opening("\n")
HINT = 8  # last tokens of the chunk before that a later sentence names


class PooledBudget(Eviction):
    """Layers and heads share a budget as the setting ``pool`` says; ``lower_bound`` entries stay in every head."""

    pool: Pool
    lower_bound: int

    may_empty = by_settings(lambda self: not self.lower_bound)
    across_layers = by_settings(lambda self: self.pool == "global")
    heads_differ = by_settings(lambda self: self.pool != "head")


@dataclass(frozen=True)
class KVzip(PooledBudget):
    """KVzip: entries stay by the largest attention that they receive while the model repeats the context.

    Source: arXiv 2505.23416, its code (snu-mllab/KVzip) and kvpress 0.5.4. For each chunk of the context, rows run
    after the whole cache: a sentence that asks for it, and the chunk itself. Their softmax is taken anew over the first
    entries (sinks), the chunk and the rows up to each; an entry scores the largest probability of any row and query
    head of its group. One threshold for all layers and heads says what stays, so heads keep unlike numbers of entries.

    The context lies between the first and the last visual or context token; what stands outside of it competes under
    scope ``all`` alone, and scores 1, as in both releases. The budget is met exactly. Where a chat template opens the
    prompt, the answer opens as that template does it. KVzip+ and scores stored for a model's heads are not offered.

    Attributes:
        chunk: tokens of the context that are repeated at a time; the original has 2,000, kvpress 2,048.
        sinks: first entries of the prompt that every task sees beside its chunk.
        pool: what shares a budget: ``global`` all layers and heads (the paper), ``layer`` the heads of a layer
            (kvpress's ``layerwise``), or each ``head`` (the original's ``uniform``).
        lower_bound: entries that every head keeps, where it has them; 0, as in the releases, may leave a head none.
    """

    name: ClassVar[str] = "kvzip"
    absolute: ClassVar[Scale | None] = Scale(log=True, high=0.0)
    needs: ClassVar[frozenset[Need]] = frozenset({"second_pass"})
    second_pass_advice: ClassVar[str] = "repeat less at a time (option chunk)"
    evenly: ClassVar[Mapping[str, Any]] = {"pool": "head", "lower_bound": 1}
    left: ClassVar[Mapping[str, Any]] = {"level": "token"}

    chunk: int = setting(2048, 1)
    sinks: int = setting(4)
    pool: Pool = "global"
    lower_bound: int = setting(1)

    def score(self, view: View) -> Scores:
        outside_BN = view.entries_BN & ~repeated_context(view.regions_BN)
        return Scores(outside_BN[:, None].float().expand(-1, view.key_BhNd.shape[1], -1), torch.zeros_like(outside_BN))

    def second_pass(self, regions_BN: Tensor) -> Tensor:
        return torch.ones_like(regions_BN[:, 0], dtype=torch.bool)

    def tasks(self, regions_BN: Tensor) -> list[TaskPlan]:
        context_BN = repeated_context(regions_BN)
        place_BN = torch.where(context_BN, context_BN.cumsum(-1) - 1, -1)
        plans = []
        for start in range(0, int(place_BN.max()) + 1, self.chunk):
            about_BN = (place_BN >= start) & (place_BN < start + self.chunk)
            said = (FIRST,) if not start else (LATER, (place_BN >= max(0, start - HINT)) & (place_BN < start))
            plans.append(TaskPlan((*said, ANSWER, about_BN), about_BN))
        return plans

    def score_task(self, view: View) -> Tensor:
        """Score the entries of the task's chunk, [B, h, N]; 0 elsewhere."""
        entries_BN = view.regions_BN != Region.PADDING
        sinks_BN = entries_BN & (entries_BN.cumsum(-1) <= self.sinks)
        chosen, index_BC = view.among(view.about_BN | sinks_BN, self.chunk + self.sinks)
        scores_BhC = over_groups(self._received(chosen), view.value_BhNd.shape[1], "max")
        scores_BhN = scores_BhC.new_zeros(*scores_BhC.shape[:2], entries_BN.shape[1])
        # padding of the choice points to row 0 and scores 0
        return scores_BhN.scatter_reduce(-1, index_BC[:, None].expand_as(scores_BhC), scores_BhC, "amax")

    def _received(self, chosen: View) -> Tensor:
        return chosen.received(largest=True)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        return counts_of_pool([each.scores_BhN for each in scores], candidates, self.pool, self.lower_bound)


@dataclass(frozen=True)
class KVgrad(KVzip):
    """KVgrad (2026): KVzip, by what an entry changes in the last states of the rows that repeat the context.

    Source: openreview.net/forum?id=cg1wTCJjjk, in the form of kvpress (#279, #286). An entry scores the largest, over
    rows and query heads, of its attention times the length of its value behind the output projection times that of the
    gradient, in the row's attention output, of the rows' squared last states. Each chunk takes a backward pass, until
    which all layers' keys stand in memory twice. What is outside of the context scores 1, as there.

    Attributes:
        chunk: tokens of the context that are repeated at a time; the other settings are KVzip's.
    """

    name: ClassVar[str] = "kvgrad"
    needs: ClassVar[frozenset[Need]] = frozenset({"second_pass", "slopes"})
    absolute: ClassVar[Scale | None] = None

    chunk: int = setting(256, 1)

    def _received(self, chosen: View) -> Tensor:
        value_BhCd, heads = chosen.value_BhNd.float(), chosen.query_BHNd.shape[1]
        weights, group = chosen.output_weight().chunk(heads, 1), heads // value_BhCd.shape[1]
        norms = [(value_BhCd[:, i // group] @ own_Dd.T).norm(dim=-1) for i, own_Dd in enumerate(weights)]
        slope_BN = F.pad(chosen.slope_BS, (value_BhCd.shape[2], 0))  # entries are no rows
        return chosen.received(weight_BN=slope_BN, largest=True) * torch.stack(norms, 1)


def repeated_context(regions_BN: Tensor) -> Tensor:
    """Mark the prompt from the first visual or context token to the last, bool [B, N]; without any, all of it."""
    entries_BN, body_BN = regions_BN != Region.PADDING, in_compressed_region(regions_BN)
    inside_BN = (body_BN.cumsum(-1) > 0) & (body_BN.flip(-1).cumsum(-1).flip(-1) > 0)
    return entries_BN & (inside_BN | ~body_BN.any(-1, keepdim=True))


WIDEST = 2**20


@dataclass(frozen=True)
class TokenScorers(CalibratedNumbers):
    """A net for every layer, from ``width`` D numbers to ``heads`` h; ``hidden`` W between its two layers, 0: one map.

    ``layers`` hold weights and biases, [h, D] and [h], or [W, D], [W], [h, W] and [h], as little-endian fp32 in base64.
    With ``sinks`` s a gate: of its W = h G d queries [W, D] and [W], keys [h d, D], norms [2, d], [h, s, d], [h, G].
    """

    most_bytes: ClassVar[int] = 2**29

    width: int
    heads: int
    hidden: int
    layers: list[str]
    sinks: int = 0

    def __post_init__(self) -> None:
        for name, least in {"width": 1, "heads": 1, "hidden": 0, "sinks": 0}.items():
            check_range(name, getattr(self, name), least, WIDEST)
        odd = self.sinks and (not self.hidden or self.hidden % (GATE_WIDTH * self.heads))
        refuse((bool(odd), f"hidden of a gate is {self.hidden}; it must be a multiple of 16 times the heads"))
        refuse((not self.layers, "layers must hold a net for every layer"))
        _ = self.nets

    @classmethod
    def of(cls, nets: Sequence[Sequence[Tensor]]) -> Self:
        """Return the nets of all layers, each given as the tensors that ``layers`` names."""
        first = nets[0]
        flats = (torch.cat([each.detach().float().cpu().flatten() for each in net]) for net in nets)
        written = [base64.b64encode(flat.numpy().astype("<f4").tobytes()).decode() for flat in flats]
        hidden, sinks = len(first[1]) if len(first) > 2 else 0, first[4].shape[1] if len(first) > 4 else 0
        return cls(first[0].shape[1], len(first[-1]), hidden, written, sinks)

    @cached_property
    def nets(self) -> list[list[Tensor]]:
        """Weights and biases of every layer, fp32."""
        shapes: list[tuple[int, ...]] = [(self.heads, self.width), (self.heads,)]
        if self.hidden:
            shapes = [(self.hidden, self.width), (self.hidden,), (self.heads, self.hidden), (self.heads,)]
        if self.sinks:
            keys, others = GATE_WIDTH * self.heads, (self.heads, self.sinks, GATE_WIDTH)
            shapes[2:] = [(keys, self.width), (2, GATE_WIDTH), others, (self.heads, self.hidden // keys)]
        return [_tensors(f"layers[{number}]", text, shapes) for number, text in enumerate(self.layers)]

    def check_shape(self, num_layers: int, num_kv_heads: int, head_dim: int) -> None:
        found = f"kvzap's file has nets for {len(self.layers)} layers of {self.heads} heads"
        unlike = (len(self.layers), self.heads) != (num_layers, num_kv_heads)
        refuse((unlike, f"{found}, and the backbone {num_layers} of {num_kv_heads}"))

    def check_width(self, hidden_size: int) -> None:
        found = f"kvzap's file has nets that read {self.width:,} numbers of a token, and the backbone's layers have"
        refuse((self.width != hidden_size, f"{found} {hidden_size:,}; make its own: subtoken-train calibrate kvzap"))

    def words(self) -> str:
        net = f"{self.width} to {self.heads}" if not self.hidden else f"{self.width} to {self.hidden} to {self.heads}"
        return f"{len(self.layers)} layers, each a {'gate' if self.sinks else 'net'} from {net}"


def _tensors(place: str, text: str, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    sizes = [int(np.prod(shape)) for shape in shapes]
    try:
        held = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{place} is not base64") from None
    if len(held) != 4 * sum(sizes):
        raise ValueError(f"{place} has {len(held):,} bytes; a net of these widths has {4 * sum(sizes):,}")
    flat = torch.from_numpy(np.frombuffer(held, "<f4").astype(np.float32))
    refuse((not bool(flat.isfinite().all()), f"{place} holds NaN or infinity"))
    return [part.view(shape) for part, shape in zip(flat.split_with_sizes(sizes), shapes, strict=True)]


def foretold(net: Sequence[Tensor], input_BND: Tensor) -> Tensor:
    """Run a layer's net (see ``TokenScorers``; on the input's device); scores [B, h, N] in fp32."""
    states = input_BND.float()
    if len(net) > 4:
        return gate_logs(net, states).transpose(1, 2)
    if len(net) > 2:
        states = F.gelu(F.linear(states, *net[:2]))
    return F.linear(states, *net[-2:]).transpose(1, 2)


GATE_WIDTH = 16


def gate_logs(net: Sequence[Tensor], states_BND: Tensor) -> Tensor:
    """Run Fast KVzip's gate, [B, N, h]: log of the share that a token's key has of its own queries, beside the sinks.

    As released (Janghyun1230/FastKVzip, ``gate.py`` @21395d1), where it is no logarithm; the mean of a head's queries.
    """
    query_WD, query_W, key_KD, norms, sink_hsd, bias_hG = net
    parts = [F.linear(states_BND, query_WD, query_W), F.linear(states_BND, key_KD)]
    parts = [part.view(*part.shape[:-1], len(sink_hsd), -1, GATE_WIDTH) for part in parts]
    query, key = (F.rms_norm(part, norm.shape, norm, 1e-6) for part, norm in zip(parts, norms, strict=True))
    own = (query * key).sum(-1) / GATE_WIDTH**0.5 + bias_hG
    others = torch.einsum("...hgd,hsd->...hgs", query, sink_hsd) / GATE_WIDTH**0.5
    return F.logsigmoid(own - others.logsumexp(-1)).logsumexp(-1) - math.log(bias_hG.shape[1])


@dataclass(frozen=True)
class KVzap(PooledBudget):
    """KVzap: a small net per layer predicts KVzip's scores; nothing runs twice.

    Source: "KVzap" (arXiv 2601.07891), in the form of kvpress (``kvzap_press.py``, ``kvzap/train.py``). A linear map,
    or two layers with a GELU between them, turns what a layer projects to queries, keys and values into the log of the
    score that KVzip would give the entry, for each key-value head. ``subtoken-train calibrate kvzap`` learns a
    backbone's nets, or by its ``sinks`` Fast KVzip's gates (arXiv 2601.17668). As under KVzip one budget serves all
    layers and heads. While tokens are decoded new entries are scored as they come, and others keep their scores. The
    release's threshold with a window of 128 is ``eviction_keep: {threshold: -4}`` here; with a budget fewer of the last
    entries always stay. The question is not read.

    Attributes:
        calibration: file of the nets; needed.
        pool: what shares a budget: ``global`` all layers and heads, ``layer`` the heads of a layer, or each ``head``.
        last: last entries of the prompt, and while tokens are decoded of all, that always stay, inside the budget.
        lower_bound: entries that every head keeps, where it has them; 0 may leave a head none.
    """

    name: ClassVar[str] = "kvzap"
    absolute: ClassVar[Scale] = Scale()
    online: ClassVar[Online] = Online(rows=0)
    calibrates: ClassVar[type[CalibratedNumbers]] = TokenScorers
    needs: ClassVar[frozenset[Need]] = frozenset({"inputs"})
    needs_file: ClassVar[bool] = True

    calibration: str | None = None
    pool: Pool = "global"
    last: int = setting(16)
    lower_bound: int = setting(1)

    @cached_property
    def _placed(self) -> dict[tuple[int, torch.device], list[Tensor]]:
        return {}

    def score(self, view: View) -> Scores:
        place = view.layer, view.key_BhNd.device
        if place not in self._placed:
            self._placed[place] = [each.to(place[1]) for each in self.read_numbers().nets[view.layer]]
        scores = after_carried(view, foretold(self._placed[place], view.input_BND.to(place[1])))
        return Scores(scores, view.window(self.last), carried=scores)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        return counts_of_pool([protected_first(each) for each in scores], candidates, self.pool, self.lower_bound)


def after_carried(view: View, new_BhN: Tensor) -> Tensor:
    """Append the scores of new entries, [B, h, n], to what the view's others had."""
    if view.carried is None:
        return new_BhN
    new, (rows, heads, length) = new_BhN.shape[-1], view.carried.shape
    # a row is a sample, or one of its heads
    return torch.cat([view.carried[..., : length - new], new_BhN.reshape(rows, heads, new)], -1)


@dataclass(frozen=True, init=False, eq=False)
class TrainedGates(Eviction):
    """DMS: entries whose trained gate is closed are dropped after a delay.

    Source: arXiv 2506.05345; the gates are those of an adapter that was trained with the routing budget ``delayed``,
    which joins its compression by itself: the threshold 0 on the gates' logits, and the delay for its window. No amount
    is promised: a head may keep all or nothing.
    """

    name: ClassVar[str] = "dms"
    absolute: ClassVar[Scale] = Scale()
    online: ClassVar[Online] = Online(rows=0)
    needs: ClassVar[frozenset[Need]] = frozenset({"inputs"})
    heads_differ: ClassVar[bool] = True
    may_empty: ClassVar[bool] = True
    decides: ClassVar[bool] = True

    def __init__(self, logits: Callable[[int, Tensor], Tensor]) -> None:
        """``logits``: from a layer and what it reads, [B, N, D], to its gates' logits, [B, h, N] in fp32."""
        vars(self)["logits"] = logits

    def score(self, view: View) -> Scores:
        logits: Callable[[int, Tensor], Tensor] = vars(self)["logits"]
        scores = after_carried(view, logits(view.layer, view.input_BND).to(view.key_BhNd.device))
        return Scores(scores, torch.zeros_like(view.entries_BN), carried=scores)


Task = Literal["auto", "aware", "agnostic", "causal"]


@dataclass(frozen=True)
class KVCompose(Eviction):
    """KVCompose: each head keeps its best entries, and one pool says how many a layer keeps.

    Source: "KVCompose: Efficient Structured KV Cache Compression with Composite Tokens", equations 14-24. The k-th
    entry that stays in a layer is a composite token: the k-th best of every head. Its importance is the mean over the
    heads; all composite tokens of all layers compete, and a layer keeps as many as win. Otherwise than in paper and
    release (which the setting ``kvpress`` imitates), a layer (a head, if not structured) keeps an entry at least,
    unless ``lower_bound`` is 0, and the budget is rounded layer by layer, unless ``exact_total`` is set.

    With a question, its rows' attention counts; without one, as in the release, the context runs a second time after
    its own cache, and its rows' does. While tokens are decoded (``eviction_every``, ours) the rows since the last
    eviction ask.

    Attributes:
        task: whose attention counts. ``aware``: the rows that ask, after the image or the context. ``agnostic``: all
            rows of the prompt, run a second time after its cache. ``causal``: all rows of the prompt in its own pass,
            which spares the second and costs most of the quality. ``auto``: ``aware`` for a prompt with a question,
            ``agnostic`` for one that ends with its image or context.
        structured: the same number of entries in every head of a layer; otherwise all heads of all layers compete in
            one pool, as entries of their own.
        composite: each head keeps its own best entries; otherwise all of a layer keep those of the best mean.
            Structured only.
        adaptive: the layers share one pool; otherwise each keeps its own budget. Structured only.
        kvpress: the first layer's curve of importance is the largest of all layers', rank by rank (structured only).
        value_norm: scores are multiplied by the norm of the value (an option of kvpress; off in the paper).
        lower_bound: entries that every layer (head, if not structured) keeps; 0, as in the paper and the release, may
            leave a layer none of what competes.
        exact_total: all layers' entries together are the budget's share of all, rounded down once (equation 21).
    """

    name: ClassVar[str] = "kvcompose"
    needs: ClassVar[frozenset[Need]] = frozenset({"blocks", "value_norms", "second_pass"})
    second_pass_advice: ClassVar[str] = "use the option task=causal, which runs it once and chooses worse"

    task: Task = "auto"
    structured: bool = True
    composite: bool = True
    adaptive: bool = True
    kvpress: bool = False
    value_norm: bool = False
    lower_bound: int = setting(1)
    exact_total: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for half in ("composite", "adaptive"):
            if not getattr(self, half) and not self.structured:
                raise ValueError(f"kvcompose {half}=False needs structured=True: without it every head is on its own")

    def score(self, view: View) -> Scores:
        among = None if self.task == "causal" else task_rows
        rows_BN = view.entries_BN if among is None else among(view.regions_BN)
        norm_BhN = view.value_norms() if self.value_norm else None
        scores_BhN = head_scores(view.received(rows_BN, largest=True, among=among), view.key_BhNd.shape[1], norm_BhN)
        mean = view.head_mean(scores_BhN)
        return Scores(scores_BhN + mean if self.composite else mean, torch.zeros_like(view.entries_BN))

    online = by_settings(lambda self: Online() if self.structured and self.composite and self.adaptive else None)
    heads_share = by_settings(lambda self: not self.composite)
    heads_differ = by_settings(lambda self: not self.structured)
    may_empty = by_settings(lambda self: not self.lower_bound)
    reads_question = by_settings(lambda self: self.task == "aware")

    def second_pass(self, regions_BN: Tensor) -> Tensor:
        unasked_B = unasked(regions_BN)
        return unasked_B if self.task == "auto" else torch.full_like(unasked_B, self.task == "agnostic")

    def score_task(self, view: View) -> Tensor:
        states = view.received(largest=True), view.value_BhNd.shape[1], view.value_norms() if self.value_norm else None
        return token_scores(*states) if self.composite else head_scores(*states).mean(1, keepdim=True)

    across_layers = by_settings(lambda self: self.adaptive)

    def counts(self, scores: list[Scores], candidates: Candidates) -> Tensor:
        if not self.adaptive:
            return candidates.budget_LB
        found = [each.scores_BhN for each in scores]
        if not self.structured:
            total_B = self._total(candidates, found[0].shape[1])
            return budgets.pooled_head_counts(found, candidates, self.lower_bound, total_B)
        heads = candidates.heads  # of a composite token, which are rows of the batch while tokens are decoded
        found = [x.view(-1, heads * x.shape[1], x.shape[2]) for x in budgets.score_curves(found, candidates)]
        curve_BLN = budgets.aligned([each.mean(1, keepdim=True) for each in found])
        if self.kvpress:
            first_BN = curve_BLN.amax(1).masked_fill(curve_BLN[:, 0].isneginf(), -torch.inf)
            curve_BLN = torch.cat([first_BN[:, None], curve_BLN[:, 1:]], 1)
        count_BL = budgets.pooled_counts(curve_BLN, self._total(candidates), self.lower_bound)
        least_LB = competing_counts(candidates).clamp(max=min(1, self.lower_bound))
        return torch.maximum(count_BL.T.repeat_interleave(heads, 1), least_LB)

    def _total(self, candidates: Candidates, heads: int = 1) -> Tensor:
        if not self.exact_total or candidates.exact_LB is None:
            return candidates.budget_LB[:, :: candidates.heads].sum(0) * heads
        # the decimal that was written: sums of millions of entries are off by more than a ninth digit
        return torch.floor(candidates.exact_LB.sum(0) * heads + 1e-6).long()


def head_scores(received_BHN: Tensor, kv_heads: int, norm_BhN: Tensor | None = None) -> Tensor:
    """Return the largest attention of any row, mean over a group, times ``norm_BhN`` (equations 14, 15), [B, h, N]."""
    scores_BhN = over_groups(received_BHN, kv_heads)
    return scores_BhN if norm_BhN is None else scores_BhN * norm_BhN


def token_scores(received_BHN: Tensor, kv_heads: int, norm_BhN: Tensor | None = None) -> Tensor:
    """Add to ``head_scores`` their mean over the key-value heads (equation 16), [B, h, N] in fp32."""
    scores_BhN = head_scores(received_BHN, kv_heads, norm_BhN)
    return scores_BhN + scores_BhN.mean(1, keepdim=True)
