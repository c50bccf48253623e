"""H2O, LOOK-M, MEDA, Elastic Cache and PrefixKV: column sums, recent shares, layers' budgets, the releases."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.base import keep_best_entries
from subtoken_train.evictions.h2o import Elastic, PrefixKV, entropy_of, prefix_counts, prefix_curve
from subtoken_train.functional.merging import merged
from subtoken_train.inference.compression import Compression
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View
from tests.support.golden_cases import close, golden_view, keep_of, load, originals, record, same_places
from tests.support.prompt_views import PROMPTS, WITH_IMAGE, DenseView, Q, V, layer_views, plan, samples
from tests.support.refusals import refuses
from tests.support.truth_cells import PLAIN_CELL, backbone_of, batch_of


def test_golden_official_prompt(shared):
    """Its recent window counts the next token's slot, so it keeps an entry less; later steps are not ours."""
    params, tensors = load(shared, "h2o_official_decode")
    length = params["prompt_len"]
    method = build_eviction("h2o", recent_share=0.0, window=params["recent_budget"] - 1)
    view = golden_view(method, {name: tensors[name][:, :, :length] for name in ("queries", "keys")})
    kept = keep_of(method, [view], params["heavy_budget"] + params["recent_budget"] - 1)[0]
    places = tensors["next_mask_step0"][:, :length].nonzero()[:, 1].view(*kept.shape[:2], -1)
    same_places(method, "h2o_official_decode prompt", kept, places)
    accumulated = tensors["acc_scores_step0"][None]  # of one sample: the original adds the samples of a batch up
    ours = method.score(view).scores_BhN
    alive = accumulated != 0  # the original clears what it evicted
    assert bool((alive | ~kept).all())
    close(method, "h2o_official_decode prompt: scores", ours[alive], accumulated[alive])


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("group", ["mean", "max"])
def test_scores_are_dense_column_sums(normalise, group):
    method = build_eviction("h2o", normalise=normalise, group=group)
    view = layer_views([[1] + [2] * 20 + [4] * 5, [4] * 11], method.needs, "left", layers=1, dropped=[(0, 0.3)])[0]
    scores = method.score(view).scores_BhN
    for sample, entries, matrix, _, _ in samples(view):
        sums = matrix.sum(1)
        if normalise:
            sums = sums / torch.arange(int(entries.sum()), 0, -1)
        grouped = sums.view(2, 2, -1)
        expected = grouped.mean(1) if group == "mean" else grouped.amax(1)
        assert torch.allclose(scores[sample][:, entries], expected, atol=1e-5)


SHARES = [(0.5, 5, 2), (0.29, 100, 29), (0.0, 7, 0), (1.0, 7, 7), (0.1, 5, 0)]
WINDOWS = [(16, 57, 16), (1, 7, 1), (7, 7, 7), (9, 7, 7)]
"""Which no share gives: 16 / 57 of 57, as a binary number, is 15 rounded down."""


@pytest.mark.parametrize(
    ("settings", "count", "recent"),
    [({"recent_share": share}, *rest) for share, *rest in SHARES]
    + [({"recent_share": 0.4, "window": window}, *rest) for window, *rest in WINDOWS],
)
def test_recent_entries_are_a_share_exact_and_rounded_down_or_a_number(settings, count, recent):
    """Early entries gather most attention when all queries are equal: what stays late is the window."""
    method, length = build_eviction("h2o", **settings), 120
    same = torch.ones(1, 1, length, 4)
    view = View(0, same, same, same, torch.full((1, length), Q), 0.5, method.needs)
    kept = keep_of(method, [view], count)[0][0, 0].nonzero()[:, 0].tolist()
    assert kept == [*range(count - recent), *range(length - recent, length)]


def test_recent_entries_are_the_last_of_the_prompt():
    """What stays anyway, since only the image competes, costs nothing of the budget: 5 of 10, one of them visual."""
    method = build_eviction("h2o")
    views = layer_views([[1] + [2] * 12 + [4] * 4, [2] * 6 + [4] * 3], method.needs, "right", layers=1)
    competes = views[0].regions_BN == V
    scores = method.score(views[0])
    kept = method.keep([scores], Candidates([views[0].regions_BN], [competes], torch.tensor([[10, 2]])))[0]
    assert (kept & competes[:, None]).sum(-1).tolist() == [[10, 10], [2, 2]]
    assert kept[0, :, 12:17].all()
    for head in range(2):
        best = scores.scores_BhN[1, head, :6].topk(2).indices
        assert kept[1, head, :6].nonzero()[:, 0].tolist() == sorted(best.tolist())


def test_look_m_s_sets_and_merged_entries_are_the_release_s():
    """One row pays all the attention, so that column sums go as the record's; its last 12 entries are recent."""
    original = originals("lookm")
    sums = original["sums"]
    rows = sums.shape[1]
    regions = torch.full((1, rows), Q)
    start = int(original["image_start"])
    regions[:, start : start + 576] = V
    method = build_eviction("look_m", window=12)
    assert method.merges == "pivot"
    attention = torch.zeros(1, len(sums), rows, rows)
    attention[0, :, -1] = sums / sums.sum(-1, keepdim=True)
    view = DenseView(attention, regions, method.needs)
    view.key_BhNd = view.value_BhNd = original["key"].float()[None]
    golden = original["kept"][None]
    kept = keep_of(method, [view], int(golden[0, 0].sum()))[0]
    same_places(method, "eviction_originals", kept, golden.nonzero()[:, 2].view(1, len(sums), -1))
    key = original["key"].float()[None]
    for word, ours in zip(("key", "value"), merged("pivot", key, key.flip(-1), kept, view.entries_BN), strict=True):
        close(method, f"eviction_originals: {word}s joined", ours[kept], original[f"{word}_out"].flatten(0, 1))
    in_half = torch.tensor(-65516.0).half() + sums.half()
    assert in_half.unique().diff().tolist() == [32, 32], "the release tells visual entries apart in half precision"


@pytest.mark.parametrize("pad", ["left", "right"])
def test_look_m_is_the_plain_reference(pad):
    """Column sums, mean over a group's query heads; text's plus twice the largest visual one; bf16 is read as it is."""
    method = build_eviction("look_m")
    for dtype in (torch.float32, torch.bfloat16):
        view = layer_views(list(PROMPTS.values()), method.needs, pad, layers=1, dtype=dtype, dropped=[(0, 0.2)])[0]
        found = method.score(view)
        for sample, entries, matrix, _, _ in samples(view):
            visual = view.regions_BN[sample, entries] == V
            sums = matrix.sum(1).view(2, 2, -1).mean(1)
            most = sums.masked_fill(~visual, 0.0).amax(-1, keepdim=True)
            torch.testing.assert_close(found.scores_BhN[sample][:, entries], torch.where(visual, sums, sums + 2 * most))


def test_entropies_are_the_release_s():
    record, method = originals("meda"), build_eviction("meda")
    query, key, visual = (record[name] for name in ("query", "key", "visual"))
    regions = torch.where(visual, V, Q)[None]
    views = [
        View(i, query[i][None], key[i][None], key[i][None], regions, key.shape[-1] ** -0.5, method.needs)
        for i in range(len(query))
    ]
    ours = torch.cat([method.score(view).weight_B for view in views])
    close(method, "eviction_originals: entropies", ours, record["entropy"])


def plain_entropy(query, key, rows, keys, scale):
    """Of the rows of all heads, over all keys that are named: the mean of what ``Categorical`` says."""
    logits = query[:, rows].float() @ key.float().repeat_interleave(len(query) // len(key), 0)[:, keys].mT * scale
    return float(torch.distributions.Categorical(logits=logits).entropy().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_meda_is_the_plain_reference(pad, dtype):
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
    refuses(r"eviction 'meda'.* cannot evict while tokens are decoded", Compression, method, 0.5, every=4)
    with pytest.raises(ValueError, match=r"'meda' reads .* has no image"):
        Compression(method, 0.5).check_prompts(batch_of({**PLAIN_CELL, "family": "llava", "batch": "text_left"}))


def golden_views(tensors, method):
    """The recorded layers, one sample."""
    return [
        DenseView(attention[None], torch.full((1, attention.shape[-1]), Q), method.needs)
        for attention in tensors["attentions"]
    ]


def test_scores_are_the_release_s_and_its_sets_are_not(shared):
    params, tensors = load(shared, "elasticcache_as_released")
    method, length, start = Elastic(), params["T"], params["start_size"]
    differing = []
    for layer, view in enumerate(golden_views(tensors, method)):
        scores = method.score(view).scores_BhN[0, 0]
        close(method, "elasticcache_as_released: scores", scores, tensors["score_sum"][layer])
        count = tensors[f"keys_out_layer{layer}"].shape[2]
        kept = keep_of(method, [view], count)[0][0, 0]
        ranked = scores[start:-1].sort(descending=True).indices[: count - 2] + start
        assert set(kept.nonzero()[:, 0].tolist()) == {0, length - 1, *ranked.tolist()}
        order = tensors["score_sum"][layer, start:-1].argsort()  # an index, compared as if it were a rank
        released = (order > int(length - length * (1 - params["ratio"]))).nonzero()[:, 0] + start
        differing.append(set(released.tolist()) ^ set(ranked.tolist()))
    assert all(differing), "the release's sets are those of the best scores: its bug is gone"


def test_scores_by_hand():
    """A plain loop over rows and heads; the ends of every sample are protected, whatever the padding."""
    method = Elastic(sinks=2, recent=3)
    for pad in ("left", "right"):
        for view in layer_views(list(PROMPTS.values()), method.needs, pad):
            found = method.score(view)
            for sample, entries, matrix, _, _ in samples(view):
                torch.testing.assert_close(found.scores_BhN[sample, 0][entries], matrix.mean(0).sum(0))
                places = entries.nonzero()[:, 0].tolist()
                assert found.protected_BN[sample].nonzero()[:, 0].tolist() == sorted({*places[:2], *places[-3:]})


CASES = ["prefixkv_ratio0.3", "prefixkv_ratio0.7"]


def counts_by_level(curves, total, protected, most):
    """The highest level of all curves' values whose prefixes cost no more; what is left, one at a time by level."""

    def at(level):
        return [
            min(most[layer], protected[layer] + 1 + sum(value < level for value in curve))
            for layer, curve in enumerate(curves)
        ]  # fmt: skip

    levels = [*sorted({value for curve in curves for value in curve}), 2.0]
    best = max((level for level in levels if sum(at(level)) <= total), default=None)
    return None if best is None else at(best)


@pytest.mark.parametrize("case", CASES)
def test_prefixes_are_the_release_s_at_its_level(shared, case):
    params, tensors = load(shared, case)
    method = PrefixKV()
    views = golden_views(tensors, method)
    scores, length = [method.score(view) for view in views], params["T"]
    whole = torch.ones(1, length, dtype=torch.bool)
    curves = [prefix_curve(each.scores_BhN[:, 0], whole) for each in scores]
    protected = torch.full((len(views), 1), params["start_size"] + params["protect_size"])
    most = torch.full((len(views), 1), length)
    raw = length - tensors["raw_forget_nums"]
    ours = prefix_counts(curves, raw.sum()[None], protected, most)
    record(method.name, f"{case}: counts at its level", int((ours[:, 0] - raw).abs().max()))
    assert ours[:, 0].tolist() == raw.tolist()
    # the release's level misses the budget, and rounding down does too; ours meets it
    exact = method.counts(scores, Candidates([v.regions_BN for v in views], [whole] * len(views), most // 2))
    assert int(exact.sum()) == int((most // 2).sum())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix", ["", "conf_"])
def test_kept_sets_are_the_release_s_at_its_counts(shared, case, prefix):
    _, tensors = load(shared, case)
    method = PrefixKV()
    for layer, view in enumerate(golden_views(tensors, method)):
        places = tensors[f"{prefix}kept_positions_layer{layer}"]
        scores = method.score(view)
        kept = keep_best_entries(scores.scores_BhN, view.entries_BN, scores.protected_BN, torch.tensor([len(places)]))
        same_places(method, f"{case} {prefix}layer {layer}", kept, places[None, None])


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 60), st.integers(0, 3))
def test_counts_equal_a_search_of_the_level(seed, layers, total, protected):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(protected + 1, 16, (layers,), generator=generator).tolist()
    curves = [prefix_curve(torch.rand(1, n, generator=generator), torch.ones(1, n, dtype=torch.bool)) for n in lengths]
    most = torch.tensor(lengths)[:, None]
    found = prefix_counts(curves, torch.tensor([total]), torch.full_like(most, protected), most)[:, 0].tolist()
    assert sum(found) == min(max(total, layers), sum(lengths))
    assert all(1 <= count <= length for count, length in zip(found, lengths, strict=True))
    expected = counts_by_level([curve[0].tolist() for curve in curves], total, [protected] * layers, lengths)
    if expected is not None:
        more = [count - other for count, other in zip(found, expected, strict=True)]
        assert min(more) >= 0 or sum(lengths) <= total
        assert sum(more) == min(total - sum(expected), sum(lengths) - sum(expected))


def test_attention_of_nothing_is_an_even_budget_and_no_division_by_zero():
    whole, ten = torch.ones(1, 10, dtype=torch.bool), torch.full((2, 1), 10)
    assert prefix_counts([prefix_curve(torch.zeros(1, 10), whole)] * 2, torch.tensor([10]), ten * 0, ten).sum() == 10
