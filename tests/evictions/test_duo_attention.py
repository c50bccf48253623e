"""DuoAttention and SimLayerKV: heads by alpha, layers by what they look at, exact budgets, and their releases."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.duo_attention import DuoAttention, HeadAlphas, attention_outside, head_counts
from subtoken_train.evictions.thresholds import Threshold
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View
from tests.support.golden_cases import alike, load
from tests.support.prompt_views import KV_HEADS, LAYERS, PROMPTS, dense_attention, layer_views, plan, samples, written


def counts_by_loop(alphas, least, most, total):
    """Heads one after another by falling alpha, each up to its whole cache; None where streaming costs too much."""
    heads = [(layer, head) for layer in range(len(alphas)) for head in range(len(alphas[layer]))]
    counts = {(layer, head): least[layer] for layer, head in heads}
    left = total - sum(counts.values())
    if left < 0:
        return None
    for layer, head in sorted(heads, key=lambda place: -alphas[place[0]][place[1]]):
        given = min(left, most[layer] - least[layer])
        counts[layer, head] += given
        left -= given
    return [[counts[layer, head] for head in range(len(alphas[layer]))] for layer in range(len(alphas))]


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 200))
def test_counts_equal_a_loop_and_the_total(seed, layers, heads, total):
    generator = torch.Generator().manual_seed(seed)
    most = torch.randint(1, 20, (layers, 1), generator=generator)
    least = torch.minimum(torch.randint(1, 8, (layers, 1), generator=generator), most)
    alphas = torch.randint(0, 4, (layers, 1, heads), generator=generator) / 3  # with ties
    found = head_counts(alphas, least, most, torch.tensor([total]))[:, 0]
    assert int(found.sum()) == min(max(total, layers * heads), int(most.sum()) * heads)
    assert (found >= 1).all()
    assert (found <= most).all()
    expected = counts_by_loop(alphas[:, 0].tolist(), least[:, 0].tolist(), most[:, 0].tolist(), total)
    if expected is None:
        assert (found <= least).all()  # all give way alike
    else:
        assert found.tolist() == expected


def test_masks_are_the_release_s(shared, tmp_path):
    """Its streaming heads at alpha 0, the others at 1, the budget that its masks leave: the same entries go."""
    params, tensors = load(shared, "kvpress_duo")
    streaming, length = tensors["streaming_mask"], params["T"]
    sinks, recent = params["sink_size"], params["recent_size"]
    numbers = HeadAlphas((~streaming).float().tolist(), sinks, recent)
    method = DuoAttention(calibration=written(tmp_path / "duo.json", "duo_attention", numbers))
    assert method.streaming == (sinks, recent)
    layers, heads = streaming.shape
    batch = len(tensors["evicted_mask"])
    regions = torch.full((batch, length), int(Region.QUERY))
    states = torch.zeros(batch, heads, length, 1)
    views = [View(i, states, states, states, regions, 1.0, method.needs) for i in range(layers)]
    total = streaming.numel() * length - int(streaming.sum()) * (length - sinks - recent)
    assert total % heads == 0
    budget = torch.zeros(layers, batch, dtype=torch.long)
    budget[0] = total // heads
    kept = method.keep([*map(method.score, views)], Candidates([regions] * layers, [regions > 0] * layers, budget))
    alike(method.name, "kvpress_duo", kept[params["layer_idx"]], ~tensors["evicted_mask"])
    for layer in range(layers):
        whole = kept[layer].all(-1)
        assert torch.equal(whole, ~streaming[layer].expand_as(whole))
    share = 1 - sum(int(each.sum()) for each in kept) / (batch * streaming.numel() * length)
    assert share == pytest.approx(float(tensors["compression_ratio"]), abs=1e-6)


@pytest.mark.parametrize("pad", ["left", "right"])
def test_alphas_of_a_prompt_equal_a_plain_sum(pad):
    sinks, recent = 2, 3
    view = layer_views(list(PROMPTS.values()), DuoAttention.needs, pad, layers=1)[0]
    found = attention_outside(view, sinks, recent)
    for sample, _, matrix, _, _ in samples(view):
        far = torch.ones_like(matrix).tril(-recent) * (torch.arange(matrix.shape[-1]) >= sinks)
        expected = (matrix * far).sum((1, 2)) / matrix.shape[-1]
        torch.testing.assert_close(found[sample], expected.view(KV_HEADS, -1).mean(1))


def test_settings_of_the_file_and_own_ones(tmp_path):
    path = written(tmp_path / "duo.json", "duo_attention", HeadAlphas([[1.0]], 4, 32))
    assert DuoAttention().streaming == (128, 256)
    assert DuoAttention(path).streaming == (4, 32)
    assert DuoAttention(path, sinks=0).streaming == (0, 32)
    assert HeadAlphas([[0.0]], 0, 1).sinks == 0


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
    view = layer_views([[1] + [3] * 20 + [4] * 4, [4] * 9, [3] * 2], method.needs, pad, layers=1, dropped=[(0, 0.3)])[0]
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
        for sample, entries, matrix, _, _ in samples(view):
            length, last = matrix.shape[-1], matrix[:, -1].mean(0)
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


def test_a_recent_share_is_of_the_budget_and_leaves_a_choice():
    method = build_eviction("simlayerkv", sinks=0, recent=0.5)
    views = [view.replaced(budget=lambda: torch.tensor([6])) for view in layer_views([[3] * 20], method.needs)]
    assert [int(method.score(view).protected_BN.sum()) for view in views] == [3] * LAYERS
    assert sorted(plan(method, views, 0.3)[1][:, 0].tolist()) == [3, 3, 12]
