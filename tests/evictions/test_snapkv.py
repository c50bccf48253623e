"""SnapKV: every golden of the family is a setting; a plain reference; prompts around the window."""

import itertools

import pytest
import torch

from subtoken_train.evictions import build_eviction
from tests.support.golden_cases import close, golden_view, keep_of, load, same_places
from tests.support.prompt_views import dense_attention, layer_views


def build(params, **settings):
    pooling = params.get("pooling", "avgpool").removesuffix("pool")
    return build_eviction(
        "snapkv", window=params["window_size"], kernel=params["kernel_size"], pooling=pooling, **settings
    )


def test_golden_original(shared):
    """A set per query head: the golden repeats the keys, as the released code does."""
    params, tensors = load(shared, "snapkv_original_avgpool")
    method = build(params)
    kept = keep_of(method, [golden_view(method, tensors, "keys_repeated")], params["max_capacity_prompt"])[0]
    same_places(method, "snapkv_original_avgpool", kept, tensors["kept_positions"])


def test_golden_original_max_pooling(shared):
    """Neighbours share a maximum, and the original's choice between them is arbitrary: kept scores are compared."""
    params, tensors = load(shared, "snapkv_original_maxpool")
    method = build(params)
    view = golden_view(method, tensors, "keys_repeated")
    scores = method.score(view).scores_BhN
    kept = keep_of(method, [view], params["max_capacity_prompt"])[0]
    places = torch.zeros_like(kept).scatter(2, tensors["kept_positions"], True)
    before = kept.shape[-1] - params["window_size"]
    assert kept[..., before:].all()
    assert places[..., before:].all()
    ours, golden = (scores[chosen].view(*scores.shape[:2], -1).sort(-1).values for chosen in (kept, places))
    close(method, "snapkv_original_maxpool: kept scores", ours, golden, rtol=0, atol=0)


@pytest.mark.parametrize("group", ["mean", "max"])
def test_golden_factory_per_kv_head(shared, group):
    params, tensors = load(shared, f"snapkv_factory_kvhead_{group}")
    method = build(params, group=group, pool_per="kv_head")
    view = golden_view(method, tensors)
    before = tensors["pooled_scores"].shape[-1]
    scores = method.score(view).scores_BhN[..., :before]
    close(method, f"snapkv_factory_kvhead_{group}: scores", scores, tensors["pooled_scores"], rtol=1e-5)
    kept = keep_of(method, [view], params["max_capacity_prompt"])[0]
    same_places(method, f"snapkv_factory_kvhead_{group}", kept, tensors["kept_positions"])


@pytest.mark.parametrize("name", ["kvpress_snapkv", "kvpress_snapkv_from_attn"])
def test_golden_press(shared, name):
    """Mean over the window's rows; the press scores the window above all others, where here it is protected.

    The second golden is the same press fed with the whole attention matrix; here both are computed from the rows.
    """
    params, tensors = load(shared, name)
    method = build(params, rows="mean")
    view = golden_view(method, tensors)
    before = tensors["scores"].shape[-1] - params["window_size"]
    close(method, f"{name}: scores", method.score(view).scores_BhN[..., :before], tensors["scores"][..., :before])
    kept = keep_of(method, [view], params["n_kept"])[0]
    same_places(method, name, kept, tensors["kept_positions"])


def plain_scores(query, key, method, scale):
    """Scores of one prompt without padding, list by list."""
    length, kv_heads = query.shape[1], len(key)
    matrix = dense_attention(query, key, [True] * length, scale)
    window = min(method.window, length)
    before = length - window
    per_head = matrix[:, before:].sum(1)[:, :before] / (window if method.rows == "mean" else 1)

    def pool(row):
        half, row = method.kernel // 2, row.tolist()
        near = [row[max(0, j - half) : j + half + 1] for j in range(before)]
        return torch.tensor([max(some) if method.pooling == "max" else sum(some) / method.kernel for some in near])

    def reduce(rows):
        grouped = rows.view(kv_heads, len(rows) // kv_heads, before)
        return grouped.mean(1) if method.group == "mean" else grouped.amax(1)

    if method.pool_per == "query_head":
        pooled = reduce(torch.stack([pool(row) for row in per_head]))
    else:
        pooled = torch.stack([pool(row) for row in reduce(per_head)])
    return torch.cat([pooled, torch.zeros(kv_heads, window)], -1)


@pytest.mark.parametrize(
    ("pooling", "pool_per", "rows", "group", "window", "kernel"),
    [
        (*words, window, kernel)
        for words in itertools.product(["avg", "max"], ["query_head", "kv_head"], ["sum", "mean"], ["mean", "max"])
        for window, kernel in [(4, 5), (10, 3)]
    ],
)
def test_equal_to_the_plain_reference(pooling, pool_per, rows, group, window, kernel):
    """Left padding, two lengths (one shorter than a window of 10), and rows that are no entries."""
    method = build_eviction(
        "snapkv", pooling=pooling, pool_per=pool_per, rows=rows, group=group, window=window, kernel=kernel
    )
    view = layer_views([[1] + [2] * 14 + [4] * 4, [4] * 9], method.needs, "left", layers=1, dropped=[(0, 0.3)])[0]
    found = method.score(view)
    for sample in range(2):
        entries = view.entries_BN[sample]
        length = int(entries.sum())
        query, key = view.query_BHNd[sample][:, entries], view.key_BhNd[sample][:, entries]
        expected = plain_scores(query, key, method, view.scale)
        assert torch.allclose(found.scores_BhN[sample][:, entries], expected, atol=1e-6)
        late = [index >= length - window for index in range(length)]
        assert found.protected_BN[sample][entries].tolist() == late
        assert not found.protected_BN[sample][~entries].any()


@pytest.mark.parametrize("count", [1, 3, 8, 12])
def test_budget_below_the_window_keeps_its_end(count):
    method = build_eviction("snapkv", window=8)
    view = layer_views([[4] * 12], method.needs, layers=1)[0]
    kept = keep_of(method, [view], count)[0]
    assert kept.sum(-1).tolist() == [[count, count]]
    assert kept[..., -min(count, 8) :].all()
