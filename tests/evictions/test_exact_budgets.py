"""Every method and wrapper keeps exactly its budget of entries, at every length: no more, and none left over."""

from __future__ import annotations

import pytest

from subtoken_train.evictions import EVICTIONS, build_eviction
from subtoken_train.types import Region
from tests.support.kvzap_files import settings_for
from tests.support.prompt_views import by_head, candidates_of, layer_views

SETTINGS = {
    "per_layer": {"shares": (3, 1, 2)},
    "duo_attention": {"sinks": 1, "recent": 3},
    "lagkv": {"sinks": 1, "lag": 4},
    "simlayerkv": {"sinks": 1, "recent": 3},
}
CHAINS = ["ada(critical(knorm))", "ada(pyramidkv)", "chunk(knorm)", "chunk(pyramidkv)", "per_layer(ada(vl_cache))"]
METHODS = [name for name in EVICTIONS if name != "quest_steps"] + CHAINS + ["chunk(snapkv)", "critical(h2o)"]
LENGTHS = (1, 2, 3, 5, 7, 16, 17, 31, 64, 65, 127, 199)
KEEP = (0.004, 0.125, 0.3, 0.5, 0.99)


@pytest.mark.parametrize("name", METHODS)
def test_all_of_a_budget_is_spent_and_nothing_more(name):
    """With every method's own windows, pages, chunks and pyramids, which all shrink to what the budget leaves.

    An entry of a layer without a set for each head is one of all its heads.
    """
    method = build_eviction(name, **{
        f"{part}.{key}": value for part in name.replace(")", "").split("(")
        for key, value in SETTINGS.get(part, {}).items()
    }, **settings_for(name))  # fmt: skip
    body = [Region.VISUAL] if method.needs_image else [Region.CONTEXT]
    prompts = [[int(code) for code in [Region.SYSTEM, *body * length, Region.QUERY]] for length in LENGTHS]
    views = layer_views(prompts, method.needs, "left")
    scores = [method.score(view) for view in views]
    for keep in KEEP:
        candidates = candidates_of(method, views, keep)
        counts, kept = by_head(method.counts(scores, candidates)), method.keep(scores, candidates)
        heads = counts.shape[-1]
        assert counts.sum((0, 2)).tolist() == (candidates.budget_LB.sum(0) * heads).tolist()
        if not method.across_layers:  # every layer has its own budget
            assert counts.sum(-1).tolist() == (candidates.budget_LB * heads).tolist()
        for layer, competes_BN in enumerate(candidates.competes_LBN):
            stays_Bh = (kept[layer] & competes_BN[:, None]).sum(-1)
            assert (stays_Bh == counts[layer]).all()
