"""Random eviction: the same in every run, another in every layer, head and seed, and fair."""

import torch

from subtoken_train.evictions import build_eviction
from tests.support.golden_cases import keep_of
from tests.support.prompt_views import layer_views


def test_reproducible_and_different_everywhere():
    method = build_eviction("random", seed=3)
    views = layer_views([[4] * 40], method.needs, layers=2)
    kept = keep_of(method, views, 20)
    again = keep_of(build_eviction("random", seed=3), views, 20)
    other = keep_of(build_eviction("random", seed=4), views, 20)
    assert all(map(torch.equal, kept, again))
    sets = [tuple(row.tolist()) for layers in (kept, other) for layer in layers for row in layer[0]]
    assert len(set(sets)) == len(sets) == 8


def test_every_entry_has_the_same_chance():
    views = layer_views([[4] * 30], frozenset(), layers=2)
    kept = [torch.stack(keep_of(build_eviction("random", seed=seed), views, 10)) for seed in range(150)]
    share = torch.stack(kept).float().mean((0, 1, 2, 3))  # of 600 draws
    assert (share - 1 / 3).abs().max() < 0.08
