"""KVzip: its tasks, scores against plain loops and the original's golden, pools of heads and layers, whole heads."""

import pytest
import torch

from subtoken_train.evictions.base import keep_best_entries
from subtoken_train.evictions.budgets import pooled_counts, score_curve
from subtoken_train.evictions.kvzip import ANSWER, FIRST, LATER, KVzip, repeated_context
from subtoken_train.view.scores import Candidates, Scores
from subtoken_train.view.view import OF_TASKS, View
from tests.support.golden_cases import close, load, record
from tests.support.helpers import random_mask, random_scores
from tests.support.prompt_views import C, Q, S, V, dense_attention

POOLS = {"global": [range(6)], "layer": [(0, 1), (2, 3), (4, 5)], "head": [(i,) for i in range(6)]}
PADDED = torch.tensor([[0, S, C, C, C, C, C, Q, Q], [S, S, V, V, Q, V, V, V, Q], [S, Q, Q, 0, 0, 0, 0, 0, 0]])


def places(marks):
    return [row.nonzero()[:, 0].tolist() for row in marks]


def test_the_context_is_the_body_of_a_prompt():
    assert places(repeated_context(PADDED)) == [[2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7], [0, 1, 2]]


def test_tasks_repeat_every_chunk_once():
    first, second = KVzip(chunk=4).tasks(PADDED)
    assert first.pieces[:2] == (FIRST, ANSWER)
    assert places(first.about_BN) == [[2, 3, 4, 5], [2, 3, 4, 5], [0, 1, 2]]
    assert second.pieces[0] == LATER
    assert places(second.pieces[1]) == [[2, 3, 4, 5], [2, 3, 4, 5], [0, 1, 2]]  # fewer than eight tokens come before
    assert second.pieces[2] == ANSWER
    assert places(second.about_BN) == [[6], [6, 7], []]
    for task in (first, second):
        assert task.pieces[-1] is task.about_BN
    third = KVzip(chunk=11).tasks(torch.full((1, 40), C))[2]
    assert places(third.pieces[1]) == [list(range(14, 22))]


def task_view(regions_BN, about_BN, rows_BS, seed=0):
    """Random states of a layer, eight wide, four query heads on two."""
    batch, length = regions_BN.shape
    count = length + rows_BS.shape[1]
    query, key = random_scores(seed, batch, 4, rows_BS.shape[1], 8), random_scores(seed + 1, batch, 2, count, 8)
    value = random_scores(seed + 2, batch, 2, length, 8)
    return View(0, query * 3, key, value, regions_BN, 8**-0.5, OF_TASKS, task_BS=rows_BS, about_BN=about_BN)


@pytest.mark.parametrize("sinks", [0, 2, 4, 30])
def test_scores_are_the_largest_of_a_softmax_over_sinks_chunk_and_rows(sinks):
    """Heads in groups, a sample without a chunk, rows that are padding; the rest of the prompt is unseen."""
    regions = torch.where(random_mask(0, 3, 20, share=0.8), C, 0)
    about, rows = (regions > 0) & (torch.arange(20) >= 9), random_mask(1, 3, 7, share=0.7)
    about[2], rows[:2, 0] = False, True
    view = task_view(regions, about, rows)
    scores = KVzip(sinks=sinks).score_task(view)
    for b in range(3):
        entries = regions[b].nonzero()[:, 0].tolist()
        seen = [i for i in entries if about[b, i] or i in entries[:sinks]]
        columns = [*seen, *(20 + i for i in rows[b].nonzero()[:, 0].tolist())]
        own = rows[b].nonzero()[:, 0].tolist()
        keys, expected = view.key_BhNd[b, :, columns], torch.zeros(2, 20)
        queries = torch.zeros(4, len(columns), 8)
        queries[:, len(seen) :] = view.query_BHNd[b, :, own]
        matrix = dense_attention(queries, keys, [True] * len(columns), view.scale)[:, len(seen) :, : len(seen)]
        if own:
            expected[:, seen] = matrix.amax(1).view(2, 2, -1).amax(1)
        assert torch.allclose(scores[b][:, about[b]], expected[:, about[b]], atol=1e-5)


def test_golden(shared):
    """The original's scores; its threshold is strict, so that it keeps one entry fewer than the budget."""
    params, tensors = load(shared, "kvzip_original")
    keys, queries = tensors["keys"], tensors["queries"]
    batch, kv_heads, count, _ = keys.shape
    length, start, stop = count - queries.shape[2], params["start_idx"], params["end_idx"]
    places_N = torch.arange(length).expand(batch, -1)
    about = (places_N >= start) & (places_N < stop)
    rows = torch.ones(batch, queries.shape[2], dtype=torch.bool)
    regions = torch.full((batch, length), C)
    scale = keys.shape[-1] ** -0.5
    view = View(0, queries, keys, keys[:, :, :length], regions, scale, OF_TASKS, task_BS=rows, about_BN=about)
    scores = KVzip(sinks=params["sink"]).score_task(view)[:, :, start:stop]
    close(KVzip(), "kvzip_original: scores", scores, tensors["score"])
    own = scores.reshape(1, batch * kv_heads, stop - start)  # its threshold is that of all its heads
    competes = torch.ones(1, stop - start, dtype=torch.bool)
    strict = int(own.numel() * params["ratio"]) - 1
    assert torch.allclose(own.flatten().sort(descending=True).values[strict], tensors["threshold"])
    pooled = pooled_counts(score_curve(own, competes), torch.tensor([strict]), 0)
    uniform = torch.tensor([int(own.shape[-1] * params["ratio"])])
    for name, counts in (("global", pooled), ("uniform", uniform)):
        kept = keep_best_entries(own, competes, torch.zeros_like(competes), counts)
        differing = int((kept.flatten() != tensors[f"valid_{name}"].flatten()).sum())
        record("kvzip", f"kvzip_original {name}: places that differ", differing)
        assert differing == 0


def found(seed, layers=3, levels=None):
    """Scores of random layers, and candidates: half of 12 entries, of 7 in the second sample."""
    regions = torch.zeros(2, 12, dtype=torch.long)
    regions[0], regions[1, 3:10] = C, C
    none = torch.zeros_like(regions, dtype=torch.bool)
    scores = [
        Scores((random_scores(seed + layer, 2, 2, 12, levels=levels) / 5).sigmoid(), none) for layer in range(layers)
    ]
    budget = torch.tensor([[6, 3]] * layers)
    return scores, Candidates([regions] * layers, [regions > 0] * layers, budget)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("level", "pool"), [(a, b) for a in ("token", "head") for b in POOLS if (a, b) != ("head", "head")]
)
def test_pools(level, pool, seed):
    """One entry of every head, then the best of a pool; whole heads come in the order of their best entries."""
    scores, candidates = found(seed * 10)
    method = KVzip(pool=pool, level=level)
    kept = method.keep(scores, candidates)
    for sample, budget in enumerate((6, 3)):
        layers = list(zip(scores, kept, candidates.competes_LBN, strict=True))
        runs = [
            s.scores_BhN[sample, h, c[sample]].sort(descending=True).values.tolist()
            for s, _, c in layers
            for h in (0, 1)
        ]
        if level == "head":
            runs = [run[:1] * len(run) for run in runs]
        counts = [0] * 6
        for group in POOLS[pool]:
            order = sorted((rank > 0, -score, run) for run in group for rank, score in enumerate(runs[run]))
            for *_, run in order[: budget * len(group)]:
                counts[run] += 1
        marks = [k[sample, h, c[sample]] for _, k, c in layers for h in (0, 1)]
        assert [int(each.sum()) for each in marks] == counts
        for each, (s, _, c), h in zip(marks, [layer for layer in layers for _ in (0, 1)], [0, 1] * 3, strict=True):
            own = s.scores_BhN[sample, h, c[sample]]
            assert level == "head" or own[each].min() >= own.sort(descending=True).values[int(each.sum()) - 1]


def test_what_is_no_context_goes_last():
    """Where everything competes, entries outside of the context come before those inside."""
    regions, context = torch.tensor([[S, C, C, C, C, Q]]), torch.tensor([[False, True, True, True, True, False]])
    view = task_view(regions, context, torch.ones(1, 3, dtype=torch.bool))
    keys = view.key_BhNd[:, :, :6]
    first = KVzip().score(View(0, view.query_BHNd, keys, view.value_BhNd, regions, view.scale, KVzip.needs))
    first.scores_BhN = torch.where(context[:, None], KVzip().score_task(view), first.scores_BhN)
    kept = KVzip().keep([first], Candidates([regions], [regions > 0], torch.tensor([[3]])))[0]
    assert kept[0, :, [0, 5]].all()
    assert kept.sum() == 6
