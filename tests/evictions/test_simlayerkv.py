"""SimLayerKV: layers by a plain reference, the released rule as a threshold, budgets, and short prompts."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.thresholds import Threshold
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from tests.support.prompt_views import LAYERS, candidates_of, dense_attention, layer_views, plan

CODES = [[1] + [3] * 20 + [4] * 4, [4] * 9, [3] * 2]


def plain_share(view, sample, method, in_scope):
    """What the last rows pay, row by row and head by head, to entries in scope that a lazy layer lets go."""
    entries = view.entries_BN[sample].nonzero()[:, 0].tolist()
    matrix = dense_attention(view.query_BHNd[sample], view.key_BhNd[sample], view.entries_BN[sample], view.scale)
    scoped = [row for row in entries if in_scope[row]]
    let_go = set(scoped) - set(entries[: method.sinks]) - set(scoped[len(scoped) - method.recent :])
    rows = entries[-method.rows :]
    paid = [float(matrix[head, row, key]) for head in range(len(matrix)) for row in rows for key in let_go]
    return sum(paid) / len(rows) / len(matrix)


@pytest.mark.parametrize(("sinks", "recent", "rows"), [(1, 3, 1), (0, 1, 4), (4, 6, 32)])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_equal_to_the_plain_reference(sinks, recent, rows, pad):
    """Several lengths (one shorter than what a lazy layer holds), and rows that are no entries."""
    method = build_eviction("simlayerkv", sinks=sinks, recent=recent, rows=rows)
    view = layer_views(CODES, method.needs, pad, layers=1, dropped=[(0, 0.3)])[0]
    for in_scope in (view.entries_BN, view.regions_BN == Region.CONTEXT):
        found = method.score(view.replaced(in_scope_BN=in_scope))
        assert found.scores_BhN.shape == (3, 1, view.regions_BN.shape[1])
        for sample in range(3):
            expected = plain_share(view, sample, method, in_scope[sample].tolist())
            assert found.scores_BhN[sample].unique().tolist() == pytest.approx([expected], abs=1e-6)


@pytest.mark.parametrize("lazy", [0.2, 0.35, 0.5])
def test_a_threshold_is_the_released_rule(lazy):
    """Layers that pay more than ``lazy`` to the first and the recent entries keep these, all others everything."""
    method = build_eviction("simlayerkv", sinks=2, recent=4)
    views = layer_views([[3] * 22, [3] * 17], method.needs, "left", layers=12)
    scores = [method.score(view) for view in views]
    regions, nothing = [view.regions_BN for view in views], torch.zeros(12, 2, dtype=torch.long)
    candidates = Candidates(regions, [codes > 0 for codes in regions], nothing)
    recent = [torch.zeros_like(view.entries_BN) for view in views]
    kept = Threshold(1 - lazy, window=0).keep(method, scores, candidates, recent)
    lazy_layers = set()
    for layer, view in enumerate(views):
        for sample, length in enumerate((22, 17)):
            entries = view.entries_BN[sample]
            own = view.query_BHNd[sample][:, entries], view.key_BhNd[sample][:, entries]
            last = dense_attention(*own, [True] * length, view.scale)[:, -1].mean(0)
            if is_lazy := float(last[:2].sum() + last[-4:].sum()) > lazy:
                lazy_layers.add((layer, sample))
            expected = [not is_lazy or place < 2 or place >= length - 4 for place in range(length)]
            assert kept[layer][sample, 0, entries].tolist() == expected
    assert 0 < len(lazy_layers) < 24
    assert build_eviction("simlayerkv", recent=0.5).absolute is None  # its window hangs on a budget


@pytest.mark.parametrize("keep", [0.05, 0.3, 0.55, 0.8, 0.97])
def test_the_layers_that_look_elsewhere_are_whole(keep):
    """One layer at most is neither whole nor lazy, budgets are exact, and the first entries stay before others do."""
    method = build_eviction("simlayerkv", sinks=2, recent=4)
    views = layer_views([[3] * 30, [3] * 19], method.needs, "right", layers=8)
    scores, counts, kept, candidates = plan(method, views, keep)
    assert torch.equal(counts.sum(0), candidates.budget_LB.sum(0))
    for sample, length in enumerate((30, 19)):
        elsewhere = [float(each.weight_B[sample]) for each in scores]
        count, budget = counts[:, sample].tolist(), int(candidates.budget_LB[:, sample].sum())
        if budget < 6 * 8:
            assert max(count) - min(count) <= 1
        else:
            order = sorted(range(8), key=lambda layer: -elsewhere[layer])
            whole = (budget - 6 * 8) // (length - 6)
            left = budget - 6 * 8 - whole * (length - 6)
            assert [count[layer] for layer in order] == ([length] * whole + [6 + left] + [6] * 8)[:8]
        for layer in range(8):
            last = count[layer] - 2
            expected = [place < min(2, count[layer]) or place >= length - last for place in range(length)]
            if count[layer] >= 2:
                assert kept[layer][sample, 0, :length].tolist() == expected


def test_layers_that_look_alike_are_whole_from_the_first():
    method = build_eviction("simlayerkv", sinks=1, recent=2)
    view = layer_views([[3] * 12], method.needs, layers=1)[0]
    counts = plan(method, [view] * 4, 0.5)[1]
    assert counts[:, 0].tolist() == [12, 6, 3, 3]


def test_a_recent_share_is_of_the_budget_and_leaves_a_choice():
    method = build_eviction("simlayerkv", sinks=0, recent=0.5)
    views = [view.replaced(budget=lambda: torch.tensor([6])) for view in layer_views([[3] * 20], method.needs)]
    assert [int(method.score(view).protected_BN.sum()) for view in views] == [3] * LAYERS
    assert sorted(plan(method, views, 0.3)[1][:, 0].tolist()) == [3, 3, 12]


def test_nothing_that_competes_and_prompts_of_one_entry():
    method = build_eviction("simlayerkv")
    views = layer_views([[4], [3, 4]], method.needs, "left")
    candidates = candidates_of(method, views, 0.5)
    none = Candidates(candidates.regions_LBN, [x & False for x in candidates.competes_LBN], candidates.budget_LB * 0)
    scores = [method.score(view) for view in views]
    assert int(method.counts(scores, none).sum()) == 0
    for view, kept in zip(views, method.keep(scores, none), strict=True):
        assert torch.equal(kept[:, 0], view.entries_BN)
    assert all(bool(each.any((1, 2)).all()) for each in method.keep(scores, candidates))
