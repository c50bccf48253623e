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


def kept_scores(method, scores, candidates, sample):
    """[(score, kept)] of every competing entry of every layer and head."""
    kept = method.keep(scores, candidates)
    return [
        list(zip(s.scores_BhN[sample, h, c[sample]].tolist(), k[sample, h, c[sample]].tolist(), strict=True))
        for s, k, c in zip(scores, kept, candidates.competes_LBN, strict=True)
        for h in range(2)
    ]


def lowest_kept_is_above(runs):
    """Of a pool: what is kept scores no less than what is not, but for the one entry that every head keeps."""
    dropped = max((score for run in runs for score, stays in run if not stays), default=-1.0)
    return all(score >= dropped or sum(stays for _, stays in run) == 1 for run in runs for score, stays in run if stays)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pool", ["global", "layer", "head"])
def test_pools(pool, seed):
    scores, candidates = found(seed * 10)
    method = KVzip(pool=pool)
    counts = method.counts(scores, candidates)
    for sample, budget in enumerate((6, 3)):
        runs = kept_scores(method, scores, candidates, sample)
        sizes = [sum(stays for _, stays in run) for run in runs]
        pools = {"global": [runs], "layer": [runs[i : i + 2] for i in (0, 2, 4)], "head": [[run] for run in runs]}[pool]
        assert sum(sizes) == budget * 6
        for members in pools:
            assert sum(stays for run in members for _, stays in run) == budget * len(members)
            assert lowest_kept_is_above(members)
        if pool != "head":
            assert counts[:, sample].flatten().tolist() == sizes


@pytest.mark.parametrize("pool", ["global", "layer"])
def test_whole_heads(pool):
    """Heads in the order of their best entries: whole, then one cut, then one entry each."""
    scores, candidates = found(3)
    counts = KVzip(level="head", pool=pool).counts(scores, candidates)
    best = torch.stack(
        [
            s.scores_BhN.masked_fill(~c[:, None], 0).amax(-1)
            for s, c in zip(scores, candidates.competes_LBN, strict=True)
        ]
    )
    for sample, (length, budget) in enumerate(((12, 6), (7, 3))):
        by_pool = [(best[:, sample].flatten(), counts[:, sample].flatten())]
        if pool == "layer":
            by_pool = list(zip(best[:, sample], counts[:, sample], strict=True))
        for value, count in by_pool:
            sizes = count[value.argsort(descending=True)].tolist()
            spare, expected = budget * len(sizes) - len(sizes), []
            for _ in sizes:
                expected.append(1 + min(spare, length - 1))
                spare -= expected[-1] - 1
            assert sizes == expected


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
