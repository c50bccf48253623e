"""A second pass: rows that run after a prompt's cache, so that a method sees what a reader of it would look at.

The rows take the positions that follow the prompt, see its cache before any eviction and each other causally, and meet
no reducer and no router. Context reducers that such a method drives, and in training routers that share one byte budget
among all layers, choose in it before the pass that counts: with LoRA, without routing and dropout.

Legend: B batch, N rows of a layer's cache (of a context reducer: positions), M rows of the contexts, S rows of the task
(of routers: value groups), O outputs of a router, K = N + S, D model width, H query heads, h key-value heads, d head
width, n layers that add features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache

from subtoken_train.engine.modes import evaluation_mode
from subtoken_train.engine.prompt_pass import PromptPass, Rows, one_past
from subtoken_train.engine.spans import PromptObserver, RunningPass, run_chunks
from subtoken_train.families.chat_template import answer_opening
from subtoken_train.families.family import Family
from subtoken_train.families.positions import warn_beyond
from subtoken_train.functional.gather import on_device, take_rows
from subtoken_train.reducers.contexts import ScoredContext
from subtoken_train.routing.bank import RouterBank, RoutingState, Spent
from subtoken_train.types import Region, before_compressed_ends
from subtoken_train.view.view import ABSENT, OF_TASKS, Opening, TaskPlan, View

BLOCK = 1024  # rows that run through a layer at a time

Again = dict[int, tuple[Tensor, Tensor]]
"""By layer, ``View.again``: the rows that were scored, bool [B, N], and their scores, [B, h, N] in fp32."""


@dataclass(frozen=True)
class TaskRows:
    """Rows that look back at a prompt; padding, on either side, is False in ``rows_BS``."""

    hidden_BSD: Tensor
    rows_BS: Tensor
    position: Tensor  # position ids, [B, S], or [3, B, S] under mRoPE
    deep_nBSD: Tensor | None = None  # added to the outputs of the first n layers; None for most models


def rows_of_task(family: Family, result: PromptPass, plan: TaskPlan) -> TaskRows:
    """Place a task's rows after the prompt: a text's count on, repeated tokens (no pieces: all) keep distances."""
    rows, start, deep = result.rows, result.rows.next_position, result.rows.deep_nBMD
    assert result.embeds_BND is not None
    if plan.pieces is None:
        hidden_BSD = take_rows(result.embeds_BND, rows.index_BM)
        return TaskRows(hidden_BSD, rows.visible_BM, start + rows.position, deep)
    parts: list[TaskRows] = []
    for piece in plan.pieces:
        if isinstance(piece, Tensor):
            parts.append(_again(result.embeds_BND, rows, piece, start))
        else:
            ids = torch.tensor(_token_ids(family, piece, rows.regions_BM), dtype=torch.long, device=start.device)
            hidden_BSD = family.token_states(ids).expand(len(rows.regions_BM), -1, -1)
            added = None if deep is None else hidden_BSD.new_zeros(len(deep), *hidden_BSD.shape)  # nothing to a text
            rows_BS = torch.ones(hidden_BSD.shape[:2], dtype=torch.bool, device=start.device)
            parts.append(TaskRows(hidden_BSD, rows_BS, start + torch.arange(len(ids), device=start.device), added))
        if parts[-1].rows_BS.shape[1]:
            start = torch.maximum(start, one_past(parts[-1].position, parts[-1].rows_BS))
    return TaskRows(
        torch.cat([part.hidden_BSD for part in parts], 1),
        torch.cat([part.rows_BS for part in parts], 1),
        torch.cat([part.position for part in parts], -1),
        None if deep is None else torch.cat([part.deep_nBSD for part in parts if part.deep_nBSD is not None], 2),
    )


def _again(embeds_BND: Tensor, rows: Rows, marked_BN: Tensor, start: Tensor) -> TaskRows:
    own, index_BS = rows.take(take_rows(marked_BN, rows.index_BM) & rows.visible_BM, pad_left=False)
    position = own.position
    if index_BS.shape[1]:
        first = position[..., :1] if position.dim() == 2 else position[..., :1].amin(0, keepdim=True)
        position = (start + position - first).masked_fill(~own.visible_BM, 0)
    return TaskRows(take_rows(embeds_BND, own.index_BM), own.visible_BM, position, own.deep_nBMD)


def task_view(
    family: Family,
    plan: TaskPlan,
    rows: Rows,
    task: TaskRows,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    slope_BS: Tensor = ABSENT,
) -> View:
    """Return one layer of a task as a method sees it, on the layer's device."""
    about_BM = rows.visible_BM if plan.about_BN is None else take_rows(plan.about_BN, rows.index_BM)
    marks = about_BM & rows.visible_BM, rows.regions_BM, task.rows_BS
    about_BM, regions_BM, asks_BS = (each.to(query.device) for each in marks)
    reach = family.window(layer, torch.cat([rows.position, task.position], -1).to(query.device))
    states, weight = (layer, query, key, value, regions_BM, scale, OF_TASKS), partial(family.output_weight, layer)
    own: dict[str, Any] = {"task_BS": asks_BS, "about_BN": about_BM, "slope_BS": slope_BS, "output_weight": weight}
    return View(*states, **own, reach=reach)


def _token_ids(family: Family, piece: str | Opening, regions_BN: Tensor) -> list[int]:
    if isinstance(piece, Opening):
        tokenizer = family.tokenizer
        # a language model's prompt that is written in the template has a SYSTEM region, a raw one has none
        templated = not family.sees_images and tokenizer.chat_template and bool((regions_BN == Region.SYSTEM).any())
        piece = answer_opening(tokenizer) if templated else piece.otherwise
    return list(family.tokenizer(piece, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def second_pass(
    family: Family,
    cache: DynamicCache,
    result: PromptPass,
    plan: TaskPlan,
    observe: Callable[..., None],
    slopes: bool = False,
) -> TaskRows:
    """Run a task after a prompt, show each layer's attention to ``observe``, and return the task's rows.

    ``observe`` gets the plan, its rows, the layer, queries, keys [B, h, K, d] of which the prompt's come first, the
    prompt's values, and the scale; with ``slopes`` ``View.slope_BS`` too, after the last layer has run. The cache is
    left as it came. The family uses packed attention.
    """
    task, held = rows_of_task(family, result, plan), result.layer_rows()
    entries = [regions_BM != Region.PADDING for _, regions_BM in held]
    hidden_BSD, unpadded = task.hidden_BSD, bool(torch.stack([each.all() for each in (*entries, task.rows_BS)]).all())
    size, shown, written = hidden_BSD.shape[1] if slopes else BLOCK, list[Any](), list[Tensor]()
    show: Callable[..., None] = (lambda *given: shown.append(given)) if slopes else observe
    with torch.set_grad_enabled(slopes):
        hidden_BSD = hidden_BSD.detach().requires_grad_(slopes)
        for layer, (rows, _) in enumerate(held):
            states, attention = cache.layers[layer], family.decoder.layers[layer].self_attn
            keys, values = states.keys, states.values
            queries, seen_BK = list[Tensor](), torch.cat([entries[layer], task.rows_BS], 1)
            further: dict[str, Any] = {"deep_nBND": task.deep_nBSD, "earlier_BM": rows.position, "unpadded": unpadded}
            given = hidden_BSD, seen_BK, task.position, size, queries
            with attention.register_forward_hook(lambda *call: written.append(call[2][0]) if slopes else None):
                hidden_BSD = run_chunks(family, cache, layer, *given, **further)
            show(plan, task, layer, queries.pop().detach(), states.keys.detach(), values, attention.scaling)
            states.keys, states.values = keys, values
        found = torch.autograd.grad(hidden_BSD[task.rows_BS].float().square().sum(), written) if slopes else ()
    for layer_states, slope_BSD in zip(shown, found, strict=True):
        observe(*layer_states, slope_BSD.float().norm(dim=-1))
    return task


@torch.no_grad()
def context_scores(family: Family, reducer: ScoredContext, run: RunningPass) -> Again:
    """Return the scores that a second pass over a batch's contexts gives; empty where the method needs none."""
    whole, method = run.rows, reducer.scorer
    regions_BN = whole.regions_BM.masked_fill(~context_rows(whole.regions_BM), Region.PADDING)
    asked_B1 = method.second_pass(regions_BN)[:, None]
    if not bool(asked_B1.any()):
        return {}
    rows, index_BM = _contexts_alone(run, f"reducer {reducer.name!r}")
    depth, cache, length = family.shape.num_layers, family.dense_cache(), whole.index_BM.shape[1]
    found: Again = {}

    def note(plan: TaskPlan, task: TaskRows, layer: int, *states: Any) -> None:
        view = task_view(family, plan, held[layer][0], task, layer, *states)
        with torch.autocast(view.about_BN.device.type, enabled=False):
            scores_BhM = method.score_task(view).expand(-1, view.value_BhNd.shape[1], -1)
        again_BhN = _placed(scores_BhM.float().mT, held[layer][0], length).mT
        about_BM1 = (view.about_BN & asked_B1.to(view.about_BN.device))[..., None]
        about_BN = _placed(about_BM1, held[layer][0], length)[..., 0]
        if layer in found:
            before_BN, before_BhN = found[layer]
            again_BhN = torch.where(about_BN[:, None], again_BhN, before_BhN)
            about_BN = about_BN | before_BN
        found[layer] = about_BN, again_BhN.contiguous()

    with evaluation_mode(family.decoder):
        hidden_BMD = take_rows(run.embeds_BND, index_BM)
        family.run_layers(hidden_BMD, rows.visible_BM, rows.position, cache, 0, depth, rows.deep_nBMD)
        result = PromptPass(hidden_BMD, rows, [(0, depth, rows)], embeds_BND=run.embeds_BND, windows=family.windows)
        held = result.layer_rows()
        for plan in method.tasks(regions_BN):
            task = second_pass(family, cache, result, plan, note, "slopes" in method.needs)
            warn_beyond(family.decoder.config, int(task.position.max()) + 1)
    return found


@torch.no_grad()
def one_budget(family: Family, bank: RouterBank, run: RunningPass, held: Sequence[Tensor]) -> dict[int, Spent]:
    """Choose keys and groups of all layers within one byte budget, among ``held`` of each layer, bool [B, N]."""
    rows, index_BM = _contexts_alone(run, "byte_pool 'all'")
    if not index_BM.shape[1]:
        return {}  # no sample has anything to choose among
    scopes = [take_rows(marks_BN, index_BM) & rows.visible_BM for marks_BN in held]
    asks_BM = torch.zeros_like(rows.visible_BM)
    state = RoutingState(asks_BM, asks_BM, rows.ordinal_BM, run.sample_seeds, scopes=scopes)
    with evaluation_mode(family.decoder), bank.routing(state):
        family.run_layers(take_rows(run.embeds_BND, index_BM), rows.visible_BM, rows.position, deep_nBND=rows.deep_nBMD)
    length, home = run.rows.index_BM.shape[1], run.rows.index_BM.device
    scores = [_placed(state.scores[layer], rows, length).to(home) for layer in range(len(held))]
    return dict(enumerate(bank.spend(scores, held)))


@torch.no_grad()
def followed(
    family: Family, cache: Cache, result: PromptPass, rows: Rows, hidden_BSD: Tensor, observer: PromptObserver | None
) -> PromptPass:
    """Run rows after a pass that filled ``cache``, reading what stays of it; both are one pass then."""
    first, state, more, depth = result.rows, result.state, hidden_BSD.shape[1], family.shape.num_layers
    assert state is not None
    kept = dict[int, Tensor]()
    for layer in range(depth):
        states, scale = cache.layers[layer], family.decoder.layers[layer].self_attn.scaling
        seen_BhK = result.kept[layer][:, None] & state.keys[layer]
        queries: list[Tensor] | None = None if observer is None else []
        seen_BK = pad(rows.visible_BM, (seen_BhK.shape[2], 0), value=True)
        given = hidden_BSD, seen_BK, rows.position, BLOCK, queries, None, None, rows.deep_nBMD, first.position
        hidden_BSD = run_chunks(family, cache, layer, *given, keys_BhN=pad(seen_BhK, (0, more), value=True))
        kept[layer] = torch.cat([result.kept[layer], rows.visible_BM], 1)
        state.masks[layer] = pad(state.masks[layer], (0, 0, 0, more), value=True)
        state.keys[layer] = pad(state.keys[layer], (0, more), value=True)
        if observer is not None and queries is not None:
            entries = on_device(rows.in_window(family.windows[layer]), states.keys.device)
            observer(layer, queries.pop(), states.keys, states.values, scale, entries)
    joined = first.followed_by(rows)
    hidden_BMD = torch.cat([result.hidden_BMD, hidden_BSD], 1)
    return replace(result, hidden_BMD=hidden_BMD, rows=joined, spans=[(0, depth, joined)], kept=kept)


def _placed(x_BMO: Tensor, rows: Rows, length: int) -> Tensor:
    """Put what stands at rows of the contexts where these stand in a batch of ``length`` positions, [B, N, O]."""
    place_BM1 = rows.index_BM.masked_fill(~rows.visible_BM, length).to(x_BMO.device)[..., None]  # padding: past all
    whole = x_BMO.new_zeros(len(x_BMO), length + 1, x_BMO.shape[2])
    return whole.scatter_(1, place_BM1.expand_as(x_BMO), x_BMO)[:, :-1]


def context_rows(regions_BM: Tensor) -> Tensor:
    """Mark what the rows after a batch's contexts read of, bool [B, M]: contexts, and all before them."""
    return before_compressed_ends(regions_BM) | (regions_BM == Region.SYSTEM)


def _contexts_alone(run: RunningPass, who: str) -> tuple[Rows, Tensor]:
    """Return the rows of the contexts, with what stands before them, and the index that gathers them."""
    if run.chunks is not None:
        raise ValueError(f"prefill_chunk: {who} runs a context twice, and chunks keep nothing of it; leave it out")
    rows, index_BM = run.rows.take(context_rows(run.rows.regions_BM), pad_left=True)
    return replace(rows, next_position=one_past(rows.position, rows.visible_BM)), index_BM
