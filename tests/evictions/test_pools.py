"""One pool of many runs against plain loops."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from subtoken_train.evictions.base import keep_best_entries
from subtoken_train.evictions.budgets import pooled_counts, score_curve
from tests.support.helpers import random_mask, random_scores


def plain_pool(curves, total, lower_bound):
    """Counts of one sample's runs: one entry after the other joins."""
    entries = [
        (rank > 0 or not lower_bound, rank >= lower_bound, -value, run, rank)
        for run, values in enumerate(curves)
        for rank, value in enumerate(values)
    ]
    chosen = [run for *_, run, _ in sorted(entries)[:total]]
    return [chosen.count(run) for run in range(len(curves))]


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=5), st.integers(0, 24), st.integers(0, 3))
@example([[5, 5], [1]], 2, 2)  # every run first
def test_pooled_counts(curves, total, lower_bound):
    curves = [sorted(values, reverse=True) for values in curves]
    padded = torch.full((1, len(curves), 6), -torch.inf)
    for run, values in enumerate(curves):
        padded[0, run, : len(values)] = torch.tensor(values, dtype=torch.float32)
    counts = pooled_counts(padded, torch.tensor([total]), lower_bound)[0].tolist()
    assert counts == plain_pool(curves, total, lower_bound)
    assert sum(counts) == min(total, sum(map(len, curves)))


def test_score_curve_and_counts_per_head():
    scores, competes = random_scores(1, 3, 2, 9), random_mask(2, 3, 9)
    curve = score_curve(scores, competes)
    counts = torch.tensor([[1, 3], [2, 2], [4, 1]])
    kept = keep_best_entries(scores, competes, torch.zeros_like(competes), counts)
    for i in range(3):
        places = competes[i].nonzero()[:, 0].tolist()
        for head in range(2):
            best = sorted(places, key=lambda place: -float(scores[i, head, place]))
            assert curve[i, head, : len(best)].tolist() == [float(scores[i, head, place]) for place in best]
            assert curve[i, head, len(best) :].isneginf().all()
            assert kept[i, head].nonzero()[:, 0].tolist() == sorted(best[: counts[i, head]])
