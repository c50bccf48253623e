"""Decoding with ``eviction_every`` beside a recompute that masks, step by step, what layers' records name as evicted.

Whether the right ones were evicted is for ``tests/view/test_online_view.py``.

Legend: B batch, h key-value heads, T tokens, N rows of the prompt.
"""

from dataclasses import dataclass, field

import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.inference.prefill import decode
from subtoken_train.types import Region
from tests.support.helpers import opened
from tests.support.reference import recompute, tapped, truths


@dataclass
class OnlineRun:
    """What was decoded, the truth of every sample, and what was there after each call."""

    tokens: list[torch.Tensor]  # [B, T]
    logits: list[torch.Tensor]  # after each call, [B, V]
    calls: list[int]  # tokens that were decoded before each logits
    truths: list
    cache: PackedCache
    held: list[list[torch.Tensor]] = field(default_factory=list)  # competing entries of layers and rows, without a tail


def columns_of(tap, layer: int, sample: int) -> torch.Tensor:
    """Column of the truth of each row that a layer's pass had as an entry."""
    result = tap.result[-1]
    first = result.spans[0][2] if result.spans else result.rows
    origin = first.index_BM[sample, first.visible_BM[sample]].tolist()
    rows, regions = result.layer_rows()[layer]
    own = rows.index_BM[sample, regions[sample] != Region.PADDING].tolist()
    return torch.tensor([origin.index(row) for row in own])


@torch.no_grad()
def decoded_online(backbone, batch, steps, compression, protocol="query_aware", chunks=()) -> OnlineRun:
    """Greedy decoding of ``steps`` tokens; ``chunks`` are (call, tokens [B, q]) that are appended with that call's."""
    with tapped(backbone) as tap:
        first, cache = opened(backbone, batch, compression, protocol)
    run = OnlineRun([], [first.logits_BV], [0], truths(backbone, tap, first.plan, batch, compression.merging), cache)
    further = dict(chunks)
    for call in range(steps):
        new = run.logits[-1].argmax(-1)[:, None]
        if call in further:
            new = torch.cat([new, further[call]], 1)
        before = getattr(cache.evictor, "evictions", 0)
        run.logits.append(decode(backbone, new, cache))
        if getattr(cache.evictor, "evictions", 0) > before:
            note_lost(run, tap, run.calls[-1])
        run.tokens.append(new)
        run.calls.append(run.calls[-1] + new.shape[1])
        run.held.append([competing(layer) for layer in cache.layers if layer.eviction_state is not None])
    return run


def competing(layer) -> torch.Tensor:
    region = layer.eviction_state.region_RM
    return ((region > 0) & (region < 128)).sum(-1)


def note_lost(run: OnlineRun, tap, appended: int) -> None:
    """Everything that came before this call's tokens and is in no record is lost."""
    for number, layer in enumerate(run.cache.layers):
        record, kv_heads = layer.eviction_state, layer.keys.shape[1]
        for sample, truth in enumerate(run.truths):
            columns = columns_of(tap, number, sample)
            row = truth.position.shape[-1] + appended
            columns = torch.cat([columns, torch.arange(truth.position.shape[-1] - len(truth.rest_q), row)])
            alive = torch.zeros(kv_heads, row, dtype=torch.bool)
            for head in range(kv_heads):
                own = sample if len(record.place_RM) == len(run.truths) else sample * kv_heads + head
                place = record.place_RM[own]
                alive[head, columns[place[place >= 0].long()]] = True
            truth.layers[number].lost.append((row, ~alive))


def largest_difference(backbone, run: OnlineRun) -> tuple[float, bool]:
    tokens = torch.cat(run.tokens, 1) if run.tokens else torch.zeros(len(run.truths), 0, dtype=torch.long)
    worst, same = 0.0, True
    for sample, truth in enumerate(run.truths):
        ours = torch.stack([logits[sample] for logits in run.logits])
        theirs = recompute(backbone, truth, tokens[sample])[torch.tensor(run.calls)]
        worst = max(worst, float((ours - theirs).abs().max()))
        same &= torch.equal(ours.argmax(-1), theirs.argmax(-1))
    return worst, same
