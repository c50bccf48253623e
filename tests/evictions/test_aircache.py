"""AirCache: each step against plain loops, the derived example, Table 5's alternatives, batches and budgets."""

import pytest
import torch

from subtoken_train.evictions.vision import AirCache, layer_weights, skewness
from subtoken_train.types import Region
from subtoken_train.view.view import View
from tests.support.golden_cases import load, record
from tests.support.prompt_views import PROMPTS, Q, V, dense_attention, layer_views


def plain_importance(view, i, observers):
    """Mean over rows and heads of one sample's attention over its visual entries and the observers, by loops."""
    visual = (view.regions_BN[i] == Region.VISUAL).tolist()
    keys = [seen or place in observers for place, seen in enumerate(visual)]
    matrix = dense_attention(view.query_BHNd[i], view.key_BhNd[i], keys, view.scale)
    mean = torch.stack([matrix[:, row].mean(0) for row in observers]).mean(0)
    return torch.tensor([float(mean[j]) if visual[j] else 0.0 for j in range(len(visual))])


def plain_elite(view, i, text, alpha):
    keys = [place in text for place in range(view.regions_BN.shape[1])]
    matrix = dense_attention(view.query_BHNd[i], view.key_BhNd[i], keys, view.scale)
    row = matrix[:, text[-1]].mean(0)
    best = max(row[j] for j in text)
    return [j for j in text if row[j] >= alpha * best]


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 1.0])
def test_importance_of_elite_tokens(alpha):
    codes = PROMPTS["two images"]
    method = AirCache(alpha=alpha)
    for view in layer_views([codes, PROMPTS["text before and after"]], method.needs):
        elite = plain_elite(view, 0, list(range(22, 27)), alpha)
        assert method.observers(view)[0].nonzero()[:, 0].tolist() == elite
        assert len(elite) == {0.0: 5, 1.0: 1}.get(alpha, len(elite))
        assert torch.allclose(method.score(view).scores_BhN[0, 0], plain_importance(view, 0, elite), atol=1e-5)


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
    method = AirCache(**settings)
    for view in layer_views([PROMPTS["text before and after"]], method.needs):
        assert method.observers(view)[0].nonzero()[:, 0].tolist() == observers
        assert torch.allclose(method.score(view).scores_BhN[0, 0], plain_importance(view, 0, observers), atol=1e-5)


def test_skewness_where_there_is_none():
    visual = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4])
    values = torch.tensor([[0.1] * 4, [0.2, 0.7, 0.0, 0.0], [0.0] * 4])
    assert skewness(values, visual).tolist() == [0.0, 0.0, 0.0]


def test_layer_weights():
    strength, skew = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[4.0], [-1.0], [0.0]])
    assert layer_weights(strength, skew, "strength")[:, 0].tolist() == [0.5, 1.0, 1.5]
    assert layer_weights(strength, skew, "skewness")[:, 0].tolist() == [3.0, 0.0, 0.0]
    assert layer_weights(strength, skew, "both")[:, 0].tolist() == [1.75, 0.5, 0.75]
    assert layer_weights(strength, skew, "uniform")[:, 0].tolist() == [1.0, 1.0, 1.0]
    assert layer_weights(strength, -skew.abs(), "skewness")[:, 0].tolist() == [1.0, 1.0, 1.0]
    assert layer_weights(strength, skew, "pyramid")[:, 0].tolist() == pytest.approx([1.95, 1.0, 0.05])


@pytest.mark.parametrize("set_name", ["set_a", "set_b"])
def test_derived_example(shared, set_name):
    """An example of the same reconstructed formulas in float64, not the authors' output."""
    params, tensors = load(shared, "aircache", set_name, "golden_derived")
    regions = torch.tensor([[V] * params["Nv"] + [Q] * params["Nt"]])
    for alpha in params["alphas"]:
        method = AirCache(alpha=alpha)
        found, worst = {"strength": [], "skewness": []}, 0.0
        for layer in range(params["L"]):
            query, key = tensors["Q"][layer][None], tensors["K"][layer][None]
            view = View(layer, query, key, key, regions, params["D"] ** -0.5, method.needs)
            elite = tensors[f"elite_mask_alpha{alpha}"][layer]
            assert method.observers(view)[0, params["Nv"] :].tolist() == elite.tolist()
            scores = method.score(view)
            expected = tensors[f"importance_alpha{alpha}"][layer]
            worst = max(worst, float((scores.scores_BhN[0, 0, : params["Nv"]] - expected).abs().max()))
            for note, values in found.items():
                values.append(scores.notes[note])
                expected = tensors[f"{note}_alpha{alpha}"][layer]
                assert float(scores.notes[note]) == pytest.approx(float(expected), rel=1e-4)
        stacked = {note: torch.stack(values) for note, values in found.items()}
        shares = layer_weights(**{f"{note}_LB": values for note, values in stacked.items()}, budgets="both")[:, 0]
        ratios = [name for name in tensors if name.startswith(f"layer_ratio_alpha{alpha}_r")]
        assert ratios
        for name in ratios:
            ours = shares * float(name.rpartition("_r")[2])
            worst = max(worst, float((ours - tensors[name]).abs().max()))
        assert worst < 1e-4
        record("aircache", f"derived example {set_name} alpha {alpha}", worst)


def test_text_that_competes_is_protected():
    method = AirCache()
    view = layer_views([PROMPTS["image last"]], method.needs)[0]
    assert method.score(view).protected_BN.tolist() == [[True] * 3 + [False] * 12]
