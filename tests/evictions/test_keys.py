"""Methods by keys: sinks, chance, unlike keys, neighbours, leverage and chunks, beside plain references."""

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions import keys as methods
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View
from tests.support.golden_cases import close, golden_view, keep_of, load, same_places
from tests.support.prompt_views import layer_views, samples


@pytest.mark.parametrize(
    ("sinks", "count", "places"),
    [
        (4, 6, [0, 1, 2, 3, 8, 9]),
        (0, 3, [7, 8, 9]),
        (4, 4, [0, 1, 2, 3]),
        (4, 2, [2, 3]),
        (20, 3, [7, 8, 9]),
        (4, 0, [3]),
    ],
)
def test_budgets_around_the_sinks(sinks, count, places):
    method = build_eviction("streaming_llm", sinks=sinks)
    view = layer_views([[int(Region.QUERY)] * 10], method.needs, layers=1)[0]
    assert keep_of(method, [view], count)[0][0, 0].nonzero()[:, 0].tolist() == places


def test_sinks_are_the_prompts_first_entries():
    """Where only the image competes, the system tokens are the sinks, and the latest visual tokens stay."""
    codes = [int(Region.SYSTEM)] * 4 + [int(Region.VISUAL)] * 8 + [int(Region.QUERY)] * 3
    method = build_eviction("streaming_llm")
    view = layer_views([codes], method.needs, pad="left", layers=1)[0]
    competes = view.regions_BN == Region.VISUAL
    kept = method.keep([method.score(view)], Candidates([view.regions_BN], [competes], torch.tensor([[3]])))[0]
    assert kept[0, 0].nonzero()[:, 0].tolist() == [3, 4, 5, 6, 12, 13, 14, 15, 16, 17]


def test_chance_is_reproducible_and_another_in_every_layer_head_and_seed():
    views = layer_views([[4] * 40], frozenset(), layers=2)
    kept, again, other = (keep_of(build_eviction("random", seed=seed), views, 20) for seed in (3, 3, 4))
    assert all(map(torch.equal, kept, again))
    sets = [tuple(row.tolist()) for layers in (kept, other) for layer in layers for row in layer[0]]
    assert len(set(sets)) == len(sets) == 8


def test_keydiff_is_its_definition_key_by_key():
    method = build_eviction("keydiff")
    view = layer_views([[1] + [2] * 14 + [4] * 4, [4] * 9], method.needs, "left", layers=1, dropped=[(0, 0.3)])[0]
    scores = method.score(view).scores_BhN
    for sample, entries, _, key_hnd, _ in samples(view):
        for head, keys in enumerate(key_hnd):
            anchor = sum(key / key.norm() for key in keys) / len(keys)
            expected = [-float(key @ anchor / key.norm() / anchor.norm()) for key in keys]
            assert scores[sample, head, entries].tolist() == pytest.approx(expected, abs=1e-6)


def test_keys_of_no_length_are_like_nothing():
    keys, entries = torch.zeros(1, 1, 4, 8), torch.ones(1, 4, dtype=torch.bool)
    assert methods.anchor_similarity(keys, entries).tolist() == [[[0.0] * 4]]
    keys[0, 0, 1:] = torch.randn(3, 8)
    found = methods.anchor_similarity(keys, entries)
    assert found.isfinite().all()
    assert found[0, 0, 0] == 0


@pytest.mark.parametrize("name", ["kvpress_lagkv", "kvpress_lagkv_cross"])
def test_lagkv_is_kvpress_s(shared, name):
    """Equal ranks are ``topk``'s own choice: scores are compared, and sets where the last that stays is no tie."""
    params, tensors = load(shared, name)
    settings = {"sinks": params["n_sink"], "lag": params["lag_size"], "cross_scoring": params["cross_scoring"]}
    method = build_eviction("lagkv", **settings)
    view, theirs, places = golden_view(method, tensors, "key", values="value"), tensors["scores"], tensors["kept"]
    close(method, f"{name}: scores", method.score(view).scores_BhN, theirs)
    count = places.shape[-1]
    kept = keep_of(method, [view], count)[0]
    ours = theirs[kept].view(*kept.shape[:2], -1).sort(-1).values
    close(method, f"{name}: kept scores", ours, theirs.gather(-1, places).sort(-1).values, rtol=0, atol=0)
    order = theirs.sort(-1, descending=True).values
    for sample, head in (order[..., count - 1] != order[..., count]).nonzero().tolist():
        one = slice(sample, sample + 1), slice(head, head + 1)
        same_places(method, name, kept[one], places[one])


def plain_scores(key, value, method):
    """Scores of one head of one prompt, and what is protected, partition by partition."""
    length = len(key)
    partitions = (length - method.sinks) // method.lag
    if partitions < 2:
        rest = length - method.sinks
        return [max(i - method.sinks, 0) / rest for i in range(length)], [i < method.sinks for i in range(length)]
    scores = [1.0] * length
    for start in range(method.sinks, method.sinks + (partitions - 1) * method.lag, method.lag):
        total = torch.zeros(method.lag).double()
        for states in (key, value):
            own, following = states[start:].double().split(method.lag)[:2]
            low, high = following.amin(0), following.amax(0)
            total += ((own - low) / (high - low)).std(1).softmax(0) / 2
        if not method.cross_scoring:
            total = (total[:, None] > total).sum(1) / method.lag
        scores[start : start + method.lag] = total.tolist()
    scored = range(method.sinks, method.sinks + (partitions - 1) * method.lag)
    return scores, [i not in scored for i in range(length)]


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(("sinks", "lag"), [(2, 4), (0, 3), (4, 6), (4, 9)])
def test_lagkv_is_the_plain_reference(cross, sinks, lag):
    """Left padding, two lengths (one with fewer than two partitions at 6), and rows that are no entries."""
    method = build_eviction("lagkv", cross_scoring=cross, sinks=sinks, lag=lag)
    view = layer_views([[1] + [2] * 20 + [4] * 4, [4] * 9], method.needs, "left", layers=1, dropped=[(0, 0.2)])[0]
    found = method.score(view)
    for sample, entries, _, keys, values in samples(view):
        for head, states in enumerate(zip(keys, values, strict=True)):
            scores, protected = plain_scores(*states, method)
            assert torch.allclose(found.scores_BhN[sample, head, entries], torch.tensor(scores), atol=1e-5)
        assert found.protected_BN[sample, entries].tolist() == protected


def test_constant_channels_say_nothing():
    """A channel that the next partition has at one value is left out; if no two are left, there is no spread."""
    states = torch.randn(1, 2, 5, 8)
    without = methods.lag_spread(states[..., :6])
    states[:, 1, :, 6:] = 0.5
    assert torch.allclose(methods.lag_spread(states), without)
    states[:, 1] = 0.5
    assert methods.lag_spread(states).tolist() == [[[0.0] * 5]]


def plain_scores_of_cur(key, value, method):
    """Scores of one head of one prompt, window by window; in windows of zeros they are 0."""
    parts = []
    for states in (key, value):
        windows = states.double().square().sum(1).split(method.local or len(states))
        parts.append(torch.cat([own / own.sum() for own in windows] if method.local else windows))
    a, b = parts
    scores = {"product": a * b, "mean": (a + b) / 2, "key": a, "value": b}[method.leverage]
    return scores / scores.sum()


@pytest.mark.parametrize("kind", ["product", "mean", "key", "value"])
@pytest.mark.parametrize(("sinks", "local"), [(2, 4), (0, 0), (30, 16)])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_cur_is_the_plain_reference(kind, sinks, local, pad):
    """Three lengths, windows that end early, and rows that are no entries: a window is of a prompt's own entries."""
    method = build_eviction("cur", leverage=kind, sinks=sinks, local=local)
    view = layer_views([[1] + [2] * 20 + [4] * 4, [4] * 9, [4]], method.needs, pad, layers=1, dropped=[(0, 0.2)])[0]
    found = method.score(view)
    for sample, entries, _, keys, values in samples(view):
        for head, states in enumerate(zip(keys, values, strict=True)):
            expected, ours = plain_scores_of_cur(*states, method), found.scores_BhN[sample, head]
            torch.testing.assert_close(ours[entries], expected.float(), rtol=1e-4, atol=1e-7)
            assert not ours[~entries].any()
        assert found.protected_BN[sample, entries].tolist() == [place < sinks for place in range(int(entries.sum()))]


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
    ratio = scores[..., :4] / method.score(view).scores_BhN[..., :4]
    assert torch.allclose(ratio, ratio[..., :1].expand_as(ratio))


class KeysGiven(View):
    """A layer whose keys before the rotary embedding are on record."""

    def unrotated_keys(self):
        return self.key_before


def test_golden_parts(shared, monkeypatch):
    """The release standardises a batch together: its scores and sets, of two samples, have nothing here to equal."""
    params, tensors = load(shared, "kvpress_compactor")
    sizes = {"sinks": params["sink_size_start"], "last": params["sink_size_end"], "chunk": params["chunk_size"]}
    method = build_eviction("compactor", **sizes, sketch=params["sketch_dimension"], masked=False)
    views = []
    for sample in range(len(tensors["key"])):
        own = {name: tensor[sample : sample + 1] for name, tensor in tensors.items()}
        view = golden_view(method, own, "key", values="value")
        view.__class__, view.key_before = KeysGiven, own["key_pre_rope"]
        views.append(view)
    monkeypatch.setattr("subtoken_train.evictions.keys.gaussian_sketch", lambda *_: tensors["sketch"][0])
    inner = torch.arange(method.sinks, params["T"] - method.last)
    query, key, pre = (tensors[name][:, :, inner] for name in ("query", "key", "key_pre_rope"))
    leverage = torch.stack([methods.leverage_scores(*each) for each in zip(pre, tensors["sketch"], strict=True)])
    close(method, "kvpress_compactor: leverage", leverage, tensors["leverage"])
    close(method, "kvpress_compactor: leverage z", methods.standardised(leverage), tensors["leverage_z"], atol=1e-5)
    sums = [methods.chunk_attention_sums(*each, method.chunk, masked=False) for each in zip(query, key, strict=True)]
    close(method, "kvpress_compactor: attention", torch.stack(sums), tensors["attention_sums"])
    parts = torch.stack([method._attention(view, 0, inner) for view in views])
    close(method, "kvpress_compactor: attention z", methods.standardised(parts), tensors["attention_z"], atol=1e-5)


def plain_attention(query, key, value, method):
    """Part (b) of one prompt, chunk by chunk and row by row, [h, n]."""
    kv_heads, length, _ = key.shape
    group, sums = len(query) // kv_heads, torch.zeros(len(query), length)
    for head in range(len(query)):
        for start in range(0, length, method.chunk):
            rows = range(start, min(start + method.chunk, length))
            absent = 0 if method.masked else method.chunk - len(rows)
            weights = (query[head, rows] @ key[head // group, rows].T).exp()
            sums[head, rows] = (weights / (weights.sum(1, keepdim=True) + absent)).sum(0)
            sums[head, rows] += absent / method.chunk  # rows of zeros look at all alike
    scores = sums.view(kv_heads, group, length).mean(1) * value.norm(dim=-1)
    return torch.stack([scores[:, max(0, j - 1) : j + 2].sum(-1) / 3 for j in range(length)], -1)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_equal_to_the_plain_reference(masked, pad):
    """Padding, three lengths (one is protected as a whole), rows that are no entries, a last chunk that is short."""
    method = build_eviction("compactor", sinks=3, last=2, chunk=4, sketch=5, blending=0.7, masked=masked, seed=2)
    view = layer_views([[1] + [2] * 16 + [4] * 4, [4] * 9, [4] * 4], method.needs, pad, dropped=[(1, 0.2)])[1]
    found = method.score(view)
    for sample in range(3):
        rows = view.entries_BN[sample].nonzero()[:, 0]
        inner = rows[3 : len(rows) - 2]
        assert found.protected_BN[sample].nonzero()[:, 0].tolist() == [x for x in rows.tolist() if x not in inner]
        assert not found.scores_BhN[sample, :, rows[:3]].any()
        if not len(inner):
            continue
        states = (each[sample][:, inner] for each in (view.query_BHNd, view.key_BhNd, view.value_BhNd))
        keys = view.unrotated_keys()[sample][:, inner]
        leverage = methods.leverage_scores(keys, methods.gaussian_sketch(2, keys.shape[-1], 5, 2 * 1_000 + 1))
        expected = methods.standardised(plain_attention(*states, method)) + 0.7 * methods.standardised(leverage)
        assert torch.allclose(found.scores_BhN[sample][:, inner], expected, atol=1e-4)


@pytest.mark.parametrize("counts", [[6, 3], [[4, 8], [1, 5]]])
def test_leverage_counts_by_the_share_that_is_removed(counts):
    """Of the competing entries, in each sample; mean over heads with budgets of their own."""
    method = build_eviction("compactor", sinks=2, last=2, chunk=8)
    view = layer_views([[4] * 24, [4] * 12], method.needs, "left", layers=1)[0]
    found = method.score(view)
    blended = method.at_budget(found, view.entries_BN, torch.tensor(counts))
    for sample, share in enumerate([0.75, 0.75]):
        expected = found.scores_BhN[sample] + share * found.notes["leverage"][sample]
        assert torch.allclose(blended.scores_BhN[sample], expected)


@pytest.mark.parametrize("count", [2, 3, 40])
def test_standardised(count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    torch.testing.assert_close(methods.standardised(values), (values - values.mean()) / values.std())
    assert methods.standardised(torch.full((count,), 3.0)).tolist() == [0.0] * count
