"""KVCompose: scores and pools against plain loops, kvpress's goldens, both structures, batches and budgets."""

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions.budgets import score_curve
from subtoken_train.evictions.kvzip import KVCompose, token_scores
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import open_prompts
from subtoken_train.view.scores import Candidates, Scores
from tests.support.golden_cases import load, record
from tests.support.helpers import compress
from tests.support.prompt_views import PROMPTS, Q, V, check_padding, layer_views, plan, samples
from tests.support.text_families import text_batch, text_family

SETTINGS = [{}, {"task": "causal"}, {"kvpress": True}, {"value_norm": True, "lower_bound": 3}, {"exact_total": True}]
ROWS = {"text before and after": range(23, 29), "context": range(18, 25), "no image": range(14), "image last": [14]}
HALVES = [{"composite": False}, {"adaptive": False}, {"composite": False, "adaptive": False}]


def plain_scores(matrix, rows, kv_heads, norms):
    """Scores of one sample from its matrix [H, N, N]; ``norms`` is [h, N] or None."""
    scores = matrix[:, list(rows)].amax(1).view(kv_heads, -1, matrix.shape[-1]).mean(1)
    scores = scores if norms is None else scores * norms
    return scores + scores.mean(0)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores(name, settings, dtype):
    method = KVCompose(**settings)
    rows = range(len(PROMPTS[name])) if method.task == "causal" else ROWS[name]
    view = layer_views([PROMPTS[name], PROMPTS["two images"]], method.needs, dtype=dtype, layers=1)[0]
    _, entries, matrix, _, value = next(samples(view))
    expected = plain_scores(matrix, rows, 2, value.float().norm(dim=-1) if method.value_norm else None)
    assert torch.allclose(method.score(view).scores_BhN[0][:, entries], expected, atol=1e-4)


@pytest.mark.parametrize("case", ["structured", "structured_vnorm_lb2", "unstructured", "unstructured_vnorm_lb2"])
def test_golden(shared, case):
    """kvpress's own scores, counts and kept sets; its attention is [task rows, context + task]."""
    params, tensors = load(shared, f"kvpress_kvcompose_{case}")
    heads, bound = params["Hkv"], params["keep_token_lower_bound"]
    layers, context = tensors["composite_scores_per_layer"].shape
    scores = []
    for layer in range(layers):
        attention_BHMK = tensors["attention"][layer]
        norms = tensors["values"][layer].norm(dim=-1) if params["add_v_norm"] else None
        scores.append(token_scores(attention_BHMK[..., :context].amax(2), heads, norms))
    worst = float((torch.cat(scores) - tensors["scores"]).abs().max())
    assert worst < 1e-5
    competes = torch.ones(1, context, dtype=torch.bool)
    found = [Scores(each, torch.zeros_like(competes)) for each in scores]
    for structured, name, curves in ((True, "layer", 1), (False, "head", heads)):
        # as kvpress rounds: the product of floats, over all of its curves
        total = int(layers * curves * context * (1 - params["compression_ratio"])) / (layers * curves)
        exact = torch.full((layers, 1), total, dtype=torch.float64)
        candidates = Candidates([competes.long()] * layers, [competes] * layers, exact.long(), exact)
        method = KVCompose(structured=structured, kvpress=structured, lower_bound=bound, exact_total=True)
        assert method.counts(found, candidates)[:, 0].tolist() == tensors[f"important_per_{name}"].tolist()
        if structured != case.startswith("un"):
            assert torch.equal(torch.stack(method.keep(found, candidates))[:, 0], tensors["kept_mask"])
    curves = torch.cat([score_curve(each, competes) for each in scores])
    composite = curves.mean(1)
    above = slice(bound, None)  # kvpress adds 1e9 to the ranks below its bound
    assert torch.allclose(composite[1:, above], tensors["composite_scores_per_layer"][1:, above], atol=1e-5)
    assert torch.allclose(composite.amax(0)[above], tensors["composite_scores_per_layer"][0, above], atol=1e-5)
    assert torch.allclose(curves[..., above], tensors["composite_scores_per_head"][..., above], atol=1e-5)
    for layer in range(layers):
        if f"kept_positions_layer{layer}" in tensors:
            positions = tensors[f"kept_positions_layer{layer}"]
            assert [each.nonzero()[:, 0].tolist() for each in tensors["kept_mask"][layer]] == positions.tolist()
    record("kvcompose", f"kvpress_kvcompose_{case}", worst)


@pytest.mark.parametrize("structured", [True, False])
def test_a_bound_of_zero_may_empty_a_layer(structured):
    """All of the budget goes where the scores are; elsewhere what competes goes, and what does not compete stays."""
    regions = torch.tensor([[V] * 6 + [Q] * 2])
    scores = [Scores(torch.rand(1, 2, 8) + 10 * layer, torch.zeros(1, 8, dtype=torch.bool)) for layer in range(3)]
    candidates = Candidates([regions] * 3, [regions == V] * 3, torch.tensor([[2], [2], [2]]))
    for bound, expected in ((0, [0, 0, 6]), (1, [1, 1, 4])):
        method = KVCompose(structured=structured, lower_bound=bound)
        for kept, count in zip(method.keep(scores, candidates), expected, strict=True):
            assert int((kept & (regions == V)[:, None]).sum()) == 2 * count
            assert kept[..., 6:].all()


PAPER = {"exact_total": True, "lower_bound": 0}  # equations 21 and 22, as the paper's grids set them


@pytest.mark.parametrize("structured", [True, False])
@pytest.mark.parametrize("percent", [90, 75, 60, 50, 40, 30, 20, 10])
def test_the_papers_total_is_kept_to_the_entry(structured, percent):
    """Equation 21 over the whole context: floor((1 - r) L N), of every head; 37 tokens and 3 layers divide nowhere."""
    backbone = compress(text_family(layers=3), None, name="none").eval()
    prompts, cache = text_batch([(37, 5, 0)]), PackedCache(3)  # and a first token that never competes
    method = KVCompose(structured=structured, **PAPER)
    opened = open_prompts(backbone, prompts, cache, Compression(method, percent / 100), "context_first")
    heads = backbone.family.shape.num_kv_heads
    kept = -3 * heads
    for layer in opened.plan.layers:
        held = layer.entries_BN >= 0
        kept += int(held.sum()) * heads if layer.heads_BNh is None else int((layer.heads_BNh & held[..., None]).sum())
    total = percent * 3 * 37 * (1 if structured else heads) // 100
    assert kept == total * (heads if structured else 1)


@pytest.mark.parametrize("percent", [90, 30, 10])
def test_the_total_of_millions_of_entries(percent):
    """80 layers of 131,072 tokens: sums in float64 are off by more than a billionth."""
    exact = torch.full((80, 1), 131_072 * (percent / 100), dtype=torch.float64)
    candidates = Candidates([], [], exact.long(), exact)
    assert KVCompose(**PAPER)._total(candidates).item() == percent * 80 * 131_072 // 100


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("keep", [0.05, 0.3, 0.8, 1.0])
def test_budgets_of_heads(settings, keep):
    method = KVCompose(structured=False, **settings)
    views = layer_views(list(PROMPTS.values()), method.needs, "left", dropped=[(2, 0.5)])
    _, counts, kept, candidates = plan(method, views, keep)
    chosen = torch.stack([(a & b[:, None]).sum(-1) for a, b in zip(kept, candidates.competes_LBN, strict=True)])
    assert torch.equal(chosen.sum((0, 2)), candidates.budget_LB.sum(0) * 2)
    assert (chosen >= 1).all()
    assert torch.equal(counts, chosen)


@pytest.mark.parametrize("settings", HALVES)
def test_each_half_can_be_left_out(settings):
    """Without composite tokens heads keep those of the best mean; without adaptive budgets layers keep alike."""
    method, whole = KVCompose(**settings), KVCompose()
    views = layer_views([PROMPTS["context"]], method.needs)
    _, counts, kept, candidates = plan(method, views, 0.3)
    assert torch.equal(counts, candidates.budget_LB) == (not method.adaptive)
    assert int(counts.sum()) == int(candidates.budget_LB.sum())
    for view, count_B, kept_BhN, competes_BN in zip(views, counts, kept, candidates.competes_LBN, strict=True):
        own = whole.score(view).scores_BhN[0, :, competes_BN[0]]
        ranked = own if method.composite else own.mean(0, keepdim=True)
        expected = [set(row.argsort(descending=True)[: int(count_B)].tolist()) for row in ranked]
        assert [set(row[competes_BN[0]].nonzero()[:, 0].tolist()) for row in kept_BhN[0]] == expected
    check_padding(method, list(PROMPTS.values()))
    cache, backbone = PackedCache(3), compress(text_family(layers=3), None, name="none").eval()
    opened = open_prompts(backbone, text_batch([(37, 5, 0)]), cache, Compression(method, 0.3), "context_first")
    assert all((layer.heads_BNh is None) == (not method.composite) for layer in opened.plan.layers)
    assert method.online is None
