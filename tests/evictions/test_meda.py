"""MEDA: the release's cross-modal entropy, a plain reference, budgets by its softmax, prompts that it refuses."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.h2o import entropy_of
from subtoken_train.inference.compression import Compression
from subtoken_train.types import Region
from subtoken_train.view.view import View
from tests.support.golden_cases import close
from tests.support.prompt_views import WITH_IMAGE, layer_views, plan
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of

ORIGINALS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "eviction_originals.safetensors"
V, Q = int(Region.VISUAL), int(Region.QUERY)


def test_entropies_are_the_release_s():
    record = load_file(ORIGINALS)
    method = build_eviction("meda")
    query, key, visual = (record[f"meda.{name}"] for name in ("query", "key", "visual"))
    regions = torch.where(visual, V, Q)[None]
    views = [
        View(i, query[i][None], key[i][None], key[i][None], regions, key.shape[-1] ** -0.5, method.needs)
        for i in range(len(query))
    ]
    ours = torch.cat([method.score(view).weight_B for view in views])
    close(method, "eviction_originals: entropies", ours, record["meda.entropy"])


def plain_entropy(query, key, rows, keys, scale):
    """Head by head and row by row, over all keys that are named."""
    total = 0.0
    for head in range(len(query)):
        shared = key[head // (len(query) // len(key))].float()
        for row in rows:
            logits = [float(query[head, row].float() @ shared[one]) * scale for one in keys]
            weights = [math.exp(each - max(logits)) for each in logits]
            total -= sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)
    return total / len(query) / len(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_equal_to_the_plain_reference(pad, dtype):
    """Text before, between and after images; rows that are no entries look at nothing and are not looked at."""
    method = build_eviction("meda")
    view = layer_views(list(WITH_IMAGE.values()), method.needs, pad, layers=1, dtype=dtype, dropped=[(0, 0.3)])[0]
    found = method.score(view).weight_B
    for sample in range(len(WITH_IMAGE)):
        codes = view.regions_BN[sample].tolist()
        visual = [i for i, code in enumerate(codes) if code == V]
        text = [i for i, code in enumerate(codes) if code not in (V, 0)]
        states = view.query_BHNd[sample], view.key_BhNd[sample]
        expected = sum(plain_entropy(*states, *kinds, view.scale) for kinds in ((text, visual), (visual, text)))
        assert float(found[sample]) == pytest.approx(expected, rel=1e-4)
    nothing = torch.zeros_like(view.entries_BN)
    assert entropy_of(view, nothing, view.entries_BN).tolist() == [0.0] * len(WITH_IMAGE)
    assert entropy_of(view, view.entries_BN, nothing).tolist() == [0.0] * len(WITH_IMAGE)


@pytest.mark.parametrize("keep", [0.05, 0.3, 0.6])
def test_layers_share_the_budget_by_the_softmax_of_their_entropies(keep):
    method = build_eviction("meda")
    views = layer_views(list(WITH_IMAGE.values()), method.needs, "left", layers=5)
    scores, counts, kept, candidates = plan(method, views, keep)
    assert torch.equal(counts.sum(0), candidates.budget_LB.sum(0))
    share_LB = torch.stack([each.weight_B for each in scores]).softmax(0) * candidates.budget_LB.sum(0)
    most_LB = torch.stack([each.sum(-1) for each in candidates.competes_LBN])
    clear_B = ((share_LB < most_LB) & (share_LB > 1)).all(0)  # no bound is met
    assert ((counts - share_LB).abs() <= 1)[:, clear_B].all()
    assert keep < 0.1 or bool(clear_B.any())
    alone = build_eviction("look_m")
    for layer, view in enumerate(views):
        assert torch.equal(scores[layer].scores_BhN, alone.score(view).scores_BhN)
        assert (kept[layer].sum(-1) == counts[layer][:, None]).all()


def test_text_is_refused_in_words():
    method = build_eviction("meda")
    with pytest.raises(ValueError, match=r"'meda' reads the attention between text and image and .* sees no images"):
        Compression(method, 0.5).check(backbone_of({**PLAIN_CELL, "family": "llama"}).family)
    with pytest.raises(ValueError, match=r"eviction 'meda'.* cannot evict while tokens are decoded"):
        Compression(method, 0.5, every=4)
    with pytest.raises(ValueError, match=r"'meda' reads .* has no image"):
        Compression(method, 0.5).check_prompts(batch_of({**PLAIN_CELL, "family": "llava", "batch": "text_left"}))
