"""The second pass of a context reducer: what KVzip and its kind score before the pass that counts.

The contexts of a batch run alone, without routing, dropout or gradient, and then the rows that the method asks for run
after them (``second_pass.py``), as under the eviction before its question is seen. LoRA is on, so that training and
inference choose alike. Beside a training step it costs a forward pass over the context and one over what is repeated of
it; keys and values of the contexts stand in memory meanwhile, of all layers.

Legend: B batch, N positions, M rows of the contexts, h key-value heads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from subtoken_train.engine.modes import evaluation_mode
from subtoken_train.engine.prompt_pass import PromptPass, Rows, one_past
from subtoken_train.engine.second_pass import TaskRows, rows_of_task, second_pass, task_view
from subtoken_train.engine.spans import RunningPass
from subtoken_train.families.family import Family
from subtoken_train.families.positions import warn_beyond
from subtoken_train.functional.gather import take_rows
from subtoken_train.reducers.scored_context import ScoredContext
from subtoken_train.types import Region
from subtoken_train.view.view import TaskPlan

Again = dict[int, tuple[Tensor, Tensor]]
"""By layer, ``View.again``: the rows that were scored, bool [B, N], and their scores, [B, h, N] in fp32."""


@torch.no_grad()
def context_scores(family: Family, reducer: ScoredContext, run: RunningPass) -> Again:
    """Return the scores that a second pass over a batch's contexts gives; empty where the method needs none.

    Raises:
        ValueError: the pass runs in chunks, whose memory a second pass would not keep.
    """
    whole, method = run.rows, reducer.scorer
    before_BN = (whole.regions_BM == Region.CONTEXT) | (whole.regions_BM == Region.SYSTEM)
    regions_BN = whole.regions_BM.masked_fill(~before_BN, Region.PADDING)
    asked_B1 = method.second_pass(regions_BN)[:, None]
    if not bool(asked_B1.any()):
        return {}
    if run.chunks is not None:
        raise ValueError(
            f"prefill_chunk: reducer {reducer.name!r} runs a context twice, of which chunks keep nothing; leave "
            "prefill_chunk out"
        )
    assert run.embeds_BND is not None
    rows, index_BM = whole.take(before_BN, pad_left=True)
    rows = replace(rows, next_position=one_past(rows.position, rows.visible_BM))
    depth, cache = family.shape.num_layers, family.dense_cache()
    found: Again = {}
    with evaluation_mode(family.decoder):
        hidden_BMD = take_rows(run.embeds_BND, index_BM)
        family.run_layers(hidden_BMD, rows.visible_BM, rows.position, cache, 0, depth, rows.deep_nBMD)
        result = PromptPass(hidden_BMD, rows, [(0, depth, rows)], embeds_BND=run.embeds_BND, windows=family.windows)
        held = result.layer_rows()
        entries = [regions_BM != Region.PADDING for _, regions_BM in held]
        for plan in method.tasks(regions_BN):
            task = rows_of_task(family, result, plan)
            warn_beyond(family.decoder.config, int(task.position.max()) + 1)
            watch = partial(_note, family, reducer, held, plan, task, asked_B1, whole.index_BM.shape[1], found)
            second_pass(family, cache, entries, task, watch, [each.position for each, _ in held])
    return found


def _note(
    family: Family,
    reducer: ScoredContext,
    held: list[tuple[Rows, Tensor]],
    plan: TaskPlan,
    task: TaskRows,
    asked_B1: Tensor,
    length: int,
    found: Again,
    layer: int,
    *states: Any,
) -> None:
    """Put a task's scores of one layer where its rows stand in the batch; ``states`` as ``TaskObserver`` has them."""
    rows, _ = held[layer]
    view = task_view(family, plan, rows, task, layer, *states)
    with torch.autocast(view.about_BN.device.type, enabled=False):
        scores_BhM = reducer.scorer.score_task(view).expand(-1, view.value_BhNd.shape[1], -1)
    place_B1M = rows.index_BM.masked_fill(~rows.visible_BM, length).to(scores_BhM.device)[:, None]  # padding: past all

    def placed(marks: Tensor) -> Tensor:
        whole = marks.new_zeros(*marks.shape[:2], length + 1)
        return whole.scatter_(-1, place_B1M.expand_as(marks), marks)[..., :length]

    about_BN = placed((view.about_BN & asked_B1.to(view.about_BN.device))[:, None])[:, 0]
    again_BhN = placed(scores_BhM.float())
    if layer in found:
        before_BN, before_BhN = found[layer]
        again_BhN = torch.where(about_BN[:, None], again_BhN, before_BhN)
        about_BN = about_BN | before_BN
    found[layer] = about_BN, again_BhN
