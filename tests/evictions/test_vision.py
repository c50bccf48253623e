"""AirCache, VL-Cache and TGV-KV against plain loops and goldens; the papers' alternatives."""

import pandas as pd
import pytest
import torch

from subtoken_train.evictions import vision as methods
from subtoken_train.evictions.base import keep_best_entries
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates, Scores
from tests.support.golden_cases import load, record
from tests.support.prompt_views import PROMPTS, WITH_IMAGE, DenseView, Q, V, dense_attention, layer_views, plan, samples


def plain_importance(view, i, observers):
    """Mean over rows and heads of one sample's attention over its visual entries and the observers, by loops."""
    visual = (view.regions_BN[i] == Region.VISUAL).tolist()
    keys = [seen or place in observers for place, seen in enumerate(visual)]
    matrix = dense_attention(view.query_BHNd[i], view.key_BhNd[i], keys, view.scale)
    mean = torch.stack([matrix[:, row].mean(0) for row in observers]).mean(0)
    return torch.tensor([float(mean[j]) if visual[j] else 0.0 for j in range(len(visual))])


def plain_elite(view, i, text, alpha):
    keys = [place in text for place in range(view.regions_BN.shape[1])]
    row = dense_attention(view.query_BHNd[i], view.key_BhNd[i], keys, view.scale)[:, text[-1]].mean(0)
    best = max(row[j] for j in text)
    return [j for j in text if row[j] >= alpha * best]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 1.0])
def test_importance_of_elite_tokens(alpha):
    method = methods.AirCache(alpha=alpha)
    for view in layer_views([PROMPTS["two images"], PROMPTS["text before and after"]], method.needs):
        elite = plain_elite(view, 0, list(range(22, 27)), alpha)
        assert method.observers(view)[0].nonzero()[:, 0].tolist() == elite
        assert len(elite) == {0.0: 5, 1.0: 1}.get(alpha, len(elite))
        found, expected = method.score(view), plain_importance(view, 0, elite)
        assert torch.allclose(found.scores_BhN[0, 0], expected, atol=1e-5)
        assert float(found.notes["strength"][0]) == pytest.approx(float(expected.sum()), rel=1e-4)
        adjusted = pd.Series(expected[view.regions_BN[0] == V].tolist()).skew()  # Fisher's and Pearson's, too
        assert float(found.notes["skewness"][0]) == pytest.approx(adjusted, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "observers"),
    [
        ({"window": "last", "window_size": 2}, [27, 28]),
        ({"window": "last"}, list(range(23, 29))),
        ({"window": "text"}, list(range(23, 29))),
        ({"window": "visual", "window_size": 3}, [20, 21, 22]),
    ],
)
def test_importance_of_the_other_windows(settings, observers):
    method = methods.AirCache(**settings)
    for view in layer_views([PROMPTS["text before and after"]], method.needs):
        assert method.observers(view)[0].nonzero()[:, 0].tolist() == observers
        assert torch.allclose(method.score(view).scores_BhN[0, 0], plain_importance(view, 0, observers), atol=1e-5)


def test_skewness_where_there_is_none():
    visual = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4])
    values = torch.tensor([[0.1] * 4, [0.2, 0.7, 0.0, 0.0], [0.0] * 4])
    assert methods.skewness(values, visual).tolist() == [0.0, 0.0, 0.0]


def test_layer_weights():
    strength, skew = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[4.0], [-1.0], [0.0]])
    assert methods.layer_weights(strength, skew, "strength")[:, 0].tolist() == [0.5, 1.0, 1.5]
    assert methods.layer_weights(strength, skew, "skewness")[:, 0].tolist() == [3.0, 0.0, 0.0]
    assert methods.layer_weights(strength, skew, "both")[:, 0].tolist() == [1.75, 0.5, 0.75]
    assert methods.layer_weights(strength, skew, "uniform")[:, 0].tolist() == [1.0, 1.0, 1.0]
    assert methods.layer_weights(strength, -skew.abs(), "skewness")[:, 0].tolist() == [1.0, 1.0, 1.0]
    assert methods.layer_weights(strength, skew, "pyramid")[:, 0].tolist() == pytest.approx([1.95, 1.0, 0.05])


def test_text_that_competes_is_protected():
    method = methods.AirCache()
    view = layer_views([PROMPTS["image last"]], method.needs)[0]
    assert method.score(view).protected_BN.tolist() == [[True] * 3 + [False] * 12]


ROWS = {"text before and after": range(23, 29), "context": range(18, 25), "no image": range(14), "image last": [14]}


def plain_statistics(matrix, rows, threshold):
    """Column sums [H, N] and density per head of one sample without padding."""
    seen, visible = matrix[:, rows], torch.arange(matrix.shape[-1]) <= torch.tensor(rows)[:, None]
    dense = (seen >= threshold * seen.amax(-1, keepdim=True)) & visible
    return seen.sum(1), dense.sum((1, 2)) / visible.sum()


CASES = [({"threshold": each}, name, list(rows)) for each in (0.01, 0.3, 1.0) for name, rows in ROWS.items()]
CASES += [  # the last rows need not end with the image's last token, as in the paper's speed study
    ({"window": "last", "window_size": size}, "text before and after", list(range(first, 29)))
    for size, first in ((1, 28), (4, 25), (10, 19), (50, 0))
]


@pytest.mark.parametrize(("given", "name", "rows"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_and_density(given, name, rows, dtype):
    method = methods.VLCache(**given)
    for view in layer_views([PROMPTS[name], PROMPTS["two images"]], method.needs, "left", dtype=dtype):
        _, entries, matrix, _, _ = next(samples(view))
        sums, density = plain_statistics(matrix, rows, method.threshold)
        scores = method.score(view)
        assert torch.allclose(scores.scores_BhN[0][:, entries], sums.view(2, 2, -1).mean(1), atol=1e-5)
        assert float(scores.weight_B[0]) == pytest.approx(float(density.mean()), abs=2e-3)
        assert not scores.protected_BN.any()


def budget_case(density, lengths, budget):
    """Counts of one sample whose layers have these densities, entries and budgets."""
    competes = [torch.ones(1, length, dtype=torch.bool) for length in lengths]
    regions = [torch.full((1, length), Q) for length in lengths]
    scores = [
        Scores(torch.rand(1, 1, length), torch.zeros(1, length, dtype=torch.bool), torch.tensor([weight]))
        for length, weight in zip(lengths, density, strict=True)
    ]
    return scores, Candidates(regions, competes, torch.tensor(budget)[:, None])


@pytest.mark.parametrize(
    ("density", "lengths", "budget", "expected"),
    [
        ([0.3, 0.2, 0.1], [100] * 3, [20] * 3, [30, 20, 10]),
        ([0.9, 0.05, 0.05], [100] * 3, [50] * 3, [100, 25, 25]),  # a layer has no more than it has
        ([0.5, 0.5], [40, 20], [20, 10], [20, 10]),  # the share is one of a layer's own entries
        ([1.0, 1.0, 0.0], [200] * 3, [10] * 3, [14, 14, 2]),  # 1 % in any case
        ([1.0, 0.0, 0.0], [50] * 3, [1] * 3, [1, 1, 1]),  # one entry in any case
    ],
)
def test_budget_by_density(density, lengths, budget, expected):
    assert methods.VLCache().counts(*budget_case(density, lengths, budget))[:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("budgets", "expected"), [("uniform", [10, 20, 30]), ("pyramid", [29, 29, 2]), ("sparsity", [1, 1, 58])]
)
def test_other_budgets(budgets, expected):
    """Of unequal layers too: 1.95, 1 and 0.05 of 10, 20 and 30 are 19.5, 20 and 1.5, scaled to the 60 of the total."""
    scores, candidates = budget_case([0.0, 0.0, 1.0], [100] * 3, [10, 20, 30])
    assert methods.VLCache(budgets=budgets, least=0.0).counts(scores, candidates)[:, 0].tolist() == expected


@pytest.mark.parametrize(("recent", "window"), [(0.0, 0), (0.1, 2), (1.0, 20)])
def test_recent_entries_are_part_of_the_budget(recent, window):
    scores, candidates = budget_case([1.0], [100], [20])
    scores[0].scores_BhN[..., -20:] = -1.0
    scores[0].notes.update(dict.fromkeys(("entries", "in_scope"), candidates.regions_LBN[0] > 0))
    kept = methods.VLCache(recent=recent).keep(scores, candidates)[0][0, 0]
    assert int(kept.sum()) == 20
    assert int(kept[-20:].sum()) == window
    assert kept[100 - window :].all()


def plain_scores(matrix, visual, rows, normalise):
    """(attention to vision, visual scores, column sums) of one sample; rows weigh by what later ones pay."""
    rows = list(rows)
    received = matrix[rows].sum(0)
    weight = received[rows] / torch.arange(len(rows), 0, -1)
    weight = weight / weight.sum() if normalise else weight
    return float(received[visual].sum()), (weight[:, None] * matrix[rows])[:, visual].sum(0).tolist(), received


@pytest.mark.parametrize("name", WITH_IMAGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_the_paper(name, dtype):
    codes = PROMPTS[name]
    visual, text = ([i for i, code in enumerate(codes) if (code == V) == seen] for seen in (True, False))
    view = layer_views([codes], methods.TGVKV.needs, dtype=dtype, layers=1)[0]
    vision, scores, received = plain_scores(matrix_of(view), visual, text, normalise=True)
    found = methods.TGVKV().score(view)
    assert float(found.weight_B) == pytest.approx(vision, abs=1e-4)
    assert found.notes["visual"][0, visual].tolist() == pytest.approx(scores, abs=1e-5)
    assert found.notes["text"][0, text].tolist() == pytest.approx(received[text].tolist(), abs=1e-4)
    assert set(found.scores_BhN[0, 0, text].tolist()) == {float(-rank) for rank in range(len(text))}


@pytest.mark.parametrize("name", WITH_IMAGE)
def test_scores_of_the_release(name):
    codes = PROMPTS[name]
    first, last, length = codes.index(V), len(codes) - 1 - codes[::-1].index(V), len(codes)
    after = list(range(last + 1, length))
    rows = after or [last]  # an image at the end is asked about by its last entry
    view = layer_views([codes, PROMPTS["two images"]], methods.TGVKV.needs, layers=1)[0]
    matrix = matrix_of(view)
    vision, scores, received = plain_scores(matrix, range(first, last + 1), rows, normalise=False)
    found = methods.TGVKV(released=True).score(view)
    assert float(found.weight_B[0]) == pytest.approx(vision, abs=1e-4)
    expected = [*(matrix.sum(0)[:first] + 100).tolist(), *scores, *(received[after] + 100).tolist()]
    assert found.scores_BhN[0, 0, :length].tolist() == pytest.approx(expected, abs=1e-4)
    assert found.protected_BN[0].nonzero()[:, 0].tolist() == sorted({0, 1, 2, 3, length - 1})


def matrix_of(view):
    """The first sample's attention, mean over heads."""
    return next(samples(view))[2].mean(0)


@pytest.mark.parametrize("name", WITH_IMAGE)
@pytest.mark.parametrize(
    ("importance", "window_size"), [("VV+TT", 32), ("window", 3), ("window", 32), ("self", 32), ("TV+TT", 32)]
)
def test_importance_and_budgets_of_the_ablation(name, importance, window_size):
    codes = PROMPTS[name]
    everything = list(range(len(codes)))
    visual, text = ([i for i in everything if (codes[i] == V) == seen] for seen in (True, False))
    view = layer_views([codes], methods.TGVKV.needs, layers=1)[0]
    matrix = matrix_of(view)
    rows = {"VV+TT": (text, visual), "window": (everything[-window_size:],) * 2, "self": (everything,) * 2}
    for budgets, summed, columns in (("TV", text, visual), ("VV", visual, visual), ("TT", text, text)):
        found = methods.TGVKV(importance=importance, window_size=window_size, budgets=budgets).score(view)
        assert float(found.weight_B) == pytest.approx(float(matrix[summed][:, columns].sum()), abs=1e-4)
        for kind, its, own in zip(("text", "visual"), (text, visual), rows.get(importance, ()), strict=False):
            assert found.notes[kind][0, its].tolist() == pytest.approx(matrix[own][:, its].sum(0).tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("first", "order"), [("text", [3, 1, 0, 4, 2]), ("vision", [4, 2, 3, 1, 0]), ("score", [3, 4, 1, 2, 0])]
)
def test_which_kind_is_first(first, order):
    regions = torch.tensor([[Q, Q, V, Q, V]])
    text, vision = torch.tensor([[0.1, 0.5, 0, 0.9, 0]]), torch.tensor([[0, 0, 0.4, 0, 0.7]])
    ranks = methods.retention_order(text, vision, regions == Q, regions == V, first)
    assert ranks[0].argsort(descending=True).tolist() == order


class Golden:
    """A run of the released code: one view per layer, and what it made of them."""

    def __init__(self, shared, case):
        params, self.tensors = load(shared, case)
        self.layers, self.length = params["L"], params["T"]
        self.total = torch.tensor([self.layers * self.length * (1 - params["ratio"])], dtype=torch.float64)
        self.lengths = torch.full((self.layers, 1), self.length)
        regions = torch.where(self.tensors["input_ids"] == params["image_token_id"], V, Q)
        self.views = [DenseView(each[None], regions, methods.TGVKV.needs) for each in self.tensors["attentions"]]


@pytest.mark.parametrize("case", ["tgvkv_ratio0.5", "tgvkv_ratio0.8"])
def test_golden_of_the_release(shared, case):
    """Of the prompt; ``decode1_kept_positions_*`` is left out: at every step the release drops one more entry."""
    golden = Golden(shared, case)
    scores = [methods.TGVKV(released=True).score(view) for view in golden.views]
    found = torch.stack([each.scores_BhN[0] for each in scores])
    expected = golden.tensors["score_sums"]
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)
    vision = torch.stack([each.weight_B for each in scores])
    assert torch.allclose(vision[:, 0], golden.tensors["text_image_attn_sums"])
    removed = 1 - vision.double()[:, 0] / vision.double().sum() * golden.total / golden.length
    assert torch.allclose(removed, golden.tensors["layer_forget_ratio"], atol=1e-6)
    counts = methods.released_counts(vision, golden.total, golden.lengths)
    everything = torch.ones(1, golden.length, dtype=torch.bool)
    for layer, each in enumerate(scores):
        kept = keep_best_entries(each.scores_BhN, everything, each.protected_BN, counts[layer])
        assert kept[0, 0].nonzero()[:, 0].tolist() == golden.tensors[f"kept_positions_layer{layer}"].tolist()
    record("tgv_kv", f"released {case}", float((found - expected).abs().max()))


@pytest.mark.parametrize("keep", [0.3, 0.8, 1.0])
def test_budgets_of_the_release_are_rounded_layer_by_layer(keep):
    views = layer_views(list(PROMPTS.values()), methods.TGVKV.needs)
    _, counts, kept, candidates = plan(methods.TGVKV(released=True), views, keep)
    assert (counts.sum(0) <= candidates.budget_LB.sum(0) + 2).all()
    for count_B, own, competes in zip(counts, kept, candidates.competes_LBN, strict=True):
        assert ((own[:, 0] & competes).sum(-1) == count_B).all()
