"""Windows as a share of the budget: the rows that they are at VL-Cache's budgets, and what is no window."""

import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.evictions import base, build_eviction
from subtoken_train.evictions.observers import share_of
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import prefill
from tests.support.helpers import compress
from tests.support.text_families import text_batch, text_family

ROWS = 200


@pytest.fixture(scope="module")
def backbone():
    return compress(text_family(layers=2), None, name="none").eval()


def windows_and_kept(backbone, method, keep, monkeypatch, scope="all", prompt=(ROWS // 2, ROWS // 2, 0)):
    """Protected entries, and the kept ones, of every layer."""
    seen, best = [], base.keep_best_entries

    def recorded(scores_BhN, competes_BN, protected_BN, *rest):
        seen.append(int(protected_BN.sum()))
        return best(scores_BhN, competes_BN, protected_BN, *rest)

    monkeypatch.setattr(base, "keep_best_entries", recorded)
    first = prefill(backbone, text_batch([prompt]), PackedCache(2), Compression(method, keep, scope=scope))
    return seen, [int((layer.entries_BN >= 0).sum()) for layer in first.plan.layers]


@pytest.mark.parametrize(("keep", "rows"), [(0.01, 0), (0.05, 1), (0.1, 2), (0.2, 4)])
@torch.no_grad()
def test_a_tenth_of_the_budget_is_the_window(backbone, keep, rows, monkeypatch):
    """Of 2, 10, 20 and 40 entries: those that observe are 1 at least, and at 1 % one entry is still chosen."""
    for name in ("snapkv", "pyramidkv"):
        method = build_eviction(name, window=0.1)
        seen, _ = windows_and_kept(backbone, method, keep, monkeypatch)
        assert seen == [max(rows, 1)] * 2
    for settings in ({"window": 0.1}, {"recent_share": 0.1}):
        assert windows_and_kept(backbone, build_eviction("h2o", **settings), keep, monkeypatch)[0] == [rows] * 2
    uniform = build_eviction("vl_cache", recent=0.1, budgets="uniform")
    assert windows_and_kept(backbone, uniform, keep, monkeypatch)[0] == [rows] * 2


@torch.no_grad()
def test_a_window_of_64_chooses_nothing_at_one_per_cent(backbone, monkeypatch):
    seen, _ = windows_and_kept(backbone, build_eviction("pyramidkv"), 0.01, monkeypatch)
    assert seen == [64, 64]


@torch.no_grad()
def test_the_share_is_of_the_budget_in_scope(backbone, monkeypatch):
    """100 tokens of context compete: half of them is the budget, a fifth of that observes, out of the question."""
    method = build_eviction("snapkv", window=0.2)
    seen, _ = windows_and_kept(backbone, method, 0.5, monkeypatch, scope="context")
    assert seen == [10, 10]


@pytest.mark.parametrize("window", [0, -1, 0.0, 1.0, -0.1, 64.0, 1.5])
def test_what_is_no_window(window):
    with pytest.raises(ValueError, match=r"snapkv window=.* must be 1 or more entries, a whole number, or a share"):
        build_eviction("snapkv", window=window)


@pytest.mark.parametrize("window", [True, "0.1", None, [1]])
def test_types_are_strict(window):
    for name in ("snapkv", "pyramidkv", "h2o"):
        with pytest.raises(ValueError, match=f"{name} window is .*; it must be a number"):
            build_eviction(name, window=window)


def test_chunks_need_a_number_of_rows():
    with pytest.raises(ValueError, match="of which a share says no number; leave one of them out, or give window"):
        Compression(build_eviction("snapkv", window=0.1), 0.5, prefill_chunk=16)


def test_shares_are_of_the_written_decimal():
    counts = torch.arange(0, 1000, 10)
    assert share_of(counts, 0.1).tolist() == list(range(100))
    assert share_of(torch.tensor([10, 100]), 0.7).tolist() == [7, 70]
