"""TGV-KV: both readings against plain loops, the released code's goldens, the derived example, batches and budgets."""

import pytest
import torch

from subtoken_train.evictions.base import keep_best_entries
from subtoken_train.evictions.vision import TGVKV, released_counts, retention_order, text_weights
from tests.support.golden_cases import load, record
from tests.support.prompt_views import (
    PROMPTS,
    WITH_IMAGE,
    DenseView,
    Q,
    V,
    check_budget,
    check_padding,
    layer_views,
    samples,
)

KNOBS = [{"importance": each} for each in ("VV+TT", "window", "self")] + [{"importance": "window", "window_size": 3}]
KNOBS += [{"budgets": each} for each in ("VV", "TT", "uniform")] + [{"first": each} for each in ("vision", "score")]
GOLDENS = ["tgvkv_ratio0.5", "tgvkv_ratio0.8"]


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
    view = layer_views([codes], TGVKV.needs, dtype=dtype, layers=1)[0]
    vision, scores, received = plain_scores(matrix_of(view), visual, text, normalise=True)
    found = TGVKV().score(view)
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
    view = layer_views([codes, PROMPTS["two images"]], TGVKV.needs, layers=1)[0]
    matrix = matrix_of(view)
    vision, scores, received = plain_scores(matrix, range(first, last + 1), rows, normalise=False)
    found = TGVKV(released=True).score(view)
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
    view = layer_views([codes], TGVKV.needs, layers=1)[0]
    matrix = matrix_of(view)
    rows = {"VV+TT": (text, visual), "window": (everything[-window_size:],) * 2, "self": (everything,) * 2}
    for budgets, summed, columns in (("TV", text, visual), ("VV", visual, visual), ("TT", text, text)):
        found = TGVKV(importance=importance, window_size=window_size, budgets=budgets).score(view)
        assert float(found.weight_B) == pytest.approx(float(matrix[summed][:, columns].sum()), abs=1e-4)
        for kind, its, own in zip(("text", "visual"), (text, visual), rows.get(importance, ()), strict=False):
            expected = matrix[own][:, its].sum(0).tolist()
            assert found.notes[kind][0, its].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("first", "order"), [("text", [3, 1, 0, 4, 2]), ("vision", [4, 2, 3, 1, 0]), ("score", [3, 4, 1, 2, 0])]
)
def test_which_kind_is_first(first, order):
    regions = torch.tensor([[Q, Q, V, Q, V]])
    text, vision = torch.tensor([[0.1, 0.5, 0, 0.9, 0]]), torch.tensor([[0, 0, 0.4, 0, 0.7]])
    ranks = retention_order(text, vision, regions == Q, regions == V, first)
    assert ranks[0].argsort(descending=True).tolist() == order


class Golden:
    """A run of the released code: one view per layer, and what it made of them."""

    def __init__(self, shared, case):
        params, self.tensors = load(shared, case)
        self.layers, self.length = params["L"], params["T"]
        self.total = torch.tensor([self.layers * self.length * (1 - params["ratio"])], dtype=torch.float64)
        self.lengths = torch.full((self.layers, 1), self.length)
        visual = self.tensors["input_ids"] == params["image_token_id"]
        regions = torch.where(visual, V, Q)
        self.views = [DenseView(each[None], regions, TGVKV.needs) for each in self.tensors["attentions"]]


@pytest.mark.parametrize("case", GOLDENS)
def test_golden_of_the_release(shared, case):
    """Scores, layer budgets and kept positions of the prompt.

    Not compared: ``decode1_kept_positions_*``, what is left after a decoding step. The released code drops one entry
    at every step; an eviction here acts once, after the prompt.
    """
    golden = Golden(shared, case)
    scores = [TGVKV(released=True).score(view) for view in golden.views]
    found = torch.stack([each.scores_BhN[0] for each in scores])
    expected = golden.tensors["score_sums"]
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)
    vision = torch.stack([each.weight_B for each in scores])
    assert torch.allclose(vision[:, 0], golden.tensors["text_image_attn_sums"])
    removed = 1 - vision.double()[:, 0] / vision.double().sum() * golden.total / golden.length
    assert torch.allclose(removed, golden.tensors["layer_forget_ratio"], atol=1e-6)
    counts = released_counts(vision, golden.total, golden.lengths)
    everything = torch.ones(1, golden.length, dtype=torch.bool)
    for layer, each in enumerate(scores):
        kept = keep_best_entries(each.scores_BhN, everything, each.protected_BN, counts[layer])
        assert kept[0, 0].nonzero()[:, 0].tolist() == golden.tensors[f"kept_positions_layer{layer}"].tolist()
    record("tgv_kv", f"released {case}", float((found - expected).abs().max()))


@pytest.mark.parametrize("set_name", ["set_a", "set_b"])
def test_derived_example(shared, set_name):
    """An example of the same reconstructed formulas in float64, not the authors' output."""
    params, tensors = load(shared, "tgv_kv_seed", set_name, "golden_derived")
    visual, heads = params["Nv"], params["H"]
    regions = torch.tensor([[V] * visual + [Q] * params["Nt"]])
    worst, vision = 0.0, []
    for layer, attention in enumerate(tensors["attention_post_vision"]):
        matrix = torch.cat([torch.zeros(heads, visual, attention.shape[-1]), attention], 1)[None]
        scores = TGVKV().score(DenseView(matrix, regions, TGVKV.needs))
        vision.append(float(scores.weight_B))
        weight = text_weights(matrix.mean(1).sum(1), regions == Q)[0, visual:]
        for ours, name in (
            (scores.notes["visual"][0, :visual], "score_visual"),
            (scores.notes["text"][0, visual:], "score_text"),
            (weight, "text_weight"),
            (weight / weight.sum(), "text_weight_norm"),
        ):
            worst = max(worst, float((ours - tensors[name][layer]).abs().max()))
    share = torch.tensor(vision, dtype=torch.float64) / sum(vision)
    worst = max(worst, float((share - tensors["layer_share"]).abs().max()))
    assert worst < 1e-5
    record("tgv_kv", f"derived example {set_name}", worst)


@pytest.mark.parametrize("knob", KNOBS)
def test_a_sample_does_not_depend_on_its_batch_under_any_setting(knob):
    check_padding(TGVKV(**knob), list(PROMPTS.values()), dropped=[(0, 0.3), (2, 1.0)])


@pytest.mark.parametrize("keep", [0.3, 0.8, 1.0])
def test_budgets_of_the_release_are_rounded_layer_by_layer(keep):
    check_budget(TGVKV(released=True), list(PROMPTS.values()), keep, slack=2)


def test_a_prompt_without_an_image_shares_equally():
    counts, candidates = check_budget(TGVKV(), [PROMPTS["no image"]], 0.5)
    assert torch.equal(counts, candidates.budget_LB)
