"""CurDKV: a plain reference for every setting, windows and padding, values of zeros, and words for wrong settings."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.neighbours import leverage
from tests.support.golden_cases import keep_of
from tests.support.prompt_views import KV_HEADS, layer_views

CODES = [[1] + [2] * 20 + [4] * 4, [4] * 9, [4]]


def plain_scores(key, value, method):
    """Scores of one head of one prompt, number by number."""
    parts = []
    for states in (key, value):
        squares = [sum(float(x) ** 2 for x in row) for row in states]
        if method.local:
            starts = range(0, len(squares), method.local)
            windows = [squares[start : start + method.local] for start in starts]
            squares = [each / sum(own) if sum(own) else 0.0 for own in windows for each in own]
        parts.append(squares)
    combine = {
        "product": lambda a, b: a * b,
        "mean": lambda a, b: (a + b) / 2,
        "key": lambda a, b: a,
        "value": lambda a, b: b,
    }[method.leverage]
    scores = [combine(*pair) for pair in zip(*parts, strict=True)]
    return [each / sum(scores) if sum(scores) else 0.0 for each in scores]


@pytest.mark.parametrize("kind", ["product", "mean", "key", "value"])
@pytest.mark.parametrize(("sinks", "local"), [(2, 4), (0, 0), (30, 16)])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_equal_to_the_plain_reference(kind, sinks, local, pad):
    """Three lengths, windows that end early, and rows that are no entries: a window is of a prompt's own entries."""
    method = build_eviction("cur", leverage=kind, sinks=sinks, local=local)
    view = layer_views(CODES, method.needs, pad, layers=1, dropped=[(0, 0.2)])[0]
    found = method.score(view)
    for sample in range(len(CODES)):
        entries = view.entries_BN[sample]
        for head in range(KV_HEADS):
            expected = plain_scores(*(x[sample, head, entries] for x in (view.key_BhNd, view.value_BhNd)), method)
            ours = found.scores_BhN[sample, head]
            torch.testing.assert_close(ours[entries], torch.tensor(expected), rtol=1e-4, atol=1e-7)
            assert not ours[~entries].any()
        count = int(entries.sum())
        assert found.protected_BN[sample, entries].tolist() == [place < sinks for place in range(count)]


def test_equal_entries_tie_to_the_first_and_the_sinks_come_before_them():
    method = build_eviction("cur", sinks=1, local=4)
    view = layer_views([[4] * 8], method.needs, layers=1)[0]
    ones = torch.ones_like(view.key_BhNd)
    kept = keep_of(method, [view.replaced(key_BhNd=ones, value_BhNd=ones)], 3)[0]
    assert kept.tolist() == [[[True, True, True] + [False] * 5] * KV_HEADS]


def test_values_that_routing_dropped_say_nothing():
    """A window of zeros scores 0, and so does a prompt of them; entries of other windows are compared as before."""
    method = build_eviction("cur", sinks=0, local=4)
    view = layer_views([[4] * 12], method.needs, layers=1)[0]
    value = view.value_BhNd.clone()
    value[:, :, 4:8] = 0
    scores = method.score(view.replaced(value_BhNd=value)).scores_BhN
    assert scores.isfinite().all()
    assert not scores[..., 4:8].any()
    assert not method.score(view.replaced(value_BhNd=value * 0)).scores_BhN.any()
    plain = method.score(view).scores_BhN
    ratio = scores[..., :4] / plain[..., :4]
    assert torch.allclose(ratio, ratio[..., :1].expand_as(ratio))


def test_no_rows_and_what_stands_in_padding():
    nothing = leverage(torch.zeros(2, 3, 0, 4), torch.zeros(2, 0).bool(), torch.zeros(2, 0).long(), 4)
    assert nothing.shape == (2, 3, 0)
    states = torch.tensor([[[[float("nan")], [3.0], [4.0]]]])
    entries = torch.tensor([[False, True, True]])
    assert leverage(states, entries, entries.cumsum(-1) - 1, 2)[0, 0].tolist() == pytest.approx([0, 9 / 25, 16 / 25])
