"""KeyDiff: equal to the press, and to its definition, key by key."""

import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.basic import anchor_similarity
from tests.support.golden_cases import close, golden_view, load, same_sets
from tests.support.prompt_views import layer_views


def test_golden_press(shared):
    _, tensors = load(shared, "kvpress_keydiff")
    method = build_eviction("keydiff")
    view = golden_view(method, tensors)
    close(method, "kvpress_keydiff: scores", method.score(view).scores_BhN, tensors["scores"])
    same_sets(method, "kvpress_keydiff", view, tensors["kept_positions"])


def test_equal_to_the_definition():
    """Padding on the left, rows that are no entries, two lengths."""
    method = build_eviction("keydiff")
    view = layer_views([[1] + [2] * 14 + [4] * 4, [4] * 9], method.needs, "left", layers=1, dropped=[(0, 0.3)])[0]
    scores = method.score(view).scores_BhN
    for sample in range(2):
        rows = view.entries_BN[sample].nonzero()[:, 0].tolist()
        for head in range(2):
            keys = [view.key_BhNd[sample, head, row] for row in rows]
            anchor = sum(key / key.norm() for key in keys) / len(keys)
            for row, key in zip(rows, keys, strict=True):
                expected = -float(key @ anchor / key.norm() / anchor.norm())
                assert abs(float(scores[sample, head, row]) - expected) < 1e-6


def test_keys_of_no_length_are_like_nothing():
    keys = torch.zeros(1, 1, 4, 8)
    assert anchor_similarity(keys, torch.ones(1, 4, dtype=torch.bool)).tolist() == [[[0.0] * 4]]
    keys[0, 0, 1:] = torch.randn(3, 8)
    found = anchor_similarity(keys, torch.ones(1, 4, dtype=torch.bool))
    assert found.isfinite().all()
    assert found[0, 0, 0] == 0
