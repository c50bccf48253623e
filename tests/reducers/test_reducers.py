"""What every reducer does: exact counts, equal bytes of its anchor, only visual tokens leave, what is refused."""

from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.engine.compressed_backbone import images_of_samples
from subtoken_train.families.family import shapes_digest
from subtoken_train.ledger.kv_budget import KVBudget, KVShape
from subtoken_train.ledger.ledger import nominal_ledger
from subtoken_train.reducers import REDUCERS, build_reducer, split_settings
from subtoken_train.reducers.base import TowerReducer, matched_reducer
from subtoken_train.reducers.staged import PruneSchedules
from subtoken_train.types import Identity, Region, VisualStates
from subtoken_train.view.view import View
from tests.support.helpers import compress, make_batch, random_scores, unread
from tests.support.prompt_views import written
from tests.support.refusals import refuses, refusing
from tests.support.sampling import sampled

WHOLE = [name for name in REDUCERS if name not in ("quest", "evs", "vidcom2")]
SHAPE = KVShape(16, 4, 64)


def look(regions_BN, scores_BN=None, seeds=None):
    seeds = torch.arange(len(regions_BN)) + 1 if seeds is None else seeds
    unread = torch.zeros_like(regions_BN).bool()
    return View(regions_BN=regions_BN, protected_BN=unread, sample_seed_B=seeds, scout=lambda layer: scores_BN)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 12)),
    thousandths=st.integers(1, 1000),
    round_up=st.booleans(),
    levels=st.sampled_from([None, 2]),
    seed=st.integers(0, 1000),
)
def test_the_best_visual_tokens_stay_and_everything_else_but_padding(sizes, thousandths, round_up, levels, seed):
    regions = random_scores(seed, *sizes, levels=len(Region), dtype=torch.int64)
    regions = torch.where(random_scores(seed + 1, *sizes) > 0, Region.VISUAL, regions)
    scores = random_scores(seed + 2, *sizes, levels=levels)
    keep = build_reducer("fastv", thousandths / 1000, round_up).select(look(regions, scores))[0]
    for sample in range(sizes[0]):
        codes = regions[sample].tolist()
        visual = [n for n, code in enumerate(codes) if code == Region.VISUAL]
        up = -(-len(visual) * thousandths // 1000)
        count = min(len(visual), max(1, up if round_up else len(visual) * thousandths // 1000))
        best = sorted(visual, key=lambda n: (-float(scores[sample, n]), n))[:count]
        others = [n for n, code in enumerate(codes) if code not in {Region.VISUAL, Region.PADDING}]
        assert keep[sample].nonzero().flatten().tolist() == sorted(best + others)


def test_records_of_every_methods_settings_are_split():
    union = {"name": "quest", "keep_ratio": 0.5, "stage": "embeds", "layer": 2, "seed": 0, "page_size": 8, "window": 64}
    own = {"name": "quest", "keep_ratio": 0.5, "page_size": 8, "window": 64}
    assert split_settings(union) == (own, {})
    assert split_settings({**union, "layer": 3}) == (own, {"layer": 3})
    dart = {"name": "dart", "keep_ratio": 0.5, "stage": "decoder", "layer": 3}
    assert split_settings(dart) == (dart, {})
    mine = {"name": "of another package", "seed": 0}
    assert split_settings(mine) == (mine, {})


@pytest.mark.parametrize(("name", "settings"), [(name, {}) for name in WHOLE] + [("sparsevlm", {"version": 2})])
def test_everything_kept_is_the_backbone_also_through_the_gather(tiny_family, tmp_path, name, settings):
    if name == "fitprune":
        own = Identity("made/here", None, "llava", shapes_digest(tiny_family))
        settings = {"calibration": written(tmp_path / "f.json", name, PruneSchedules([[1, 0.75, 0.75, 0.5]]), own)}
    batch = make_batch([(1, 9), (2, 7), (0, 12)])
    plain, everything = compress(tiny_family), compress(tiny_family, name=name, keep_ratio=1.0, **settings)
    whole, seen = plain.run(batch).hidden_BMD, batch.regions_BN != Region.PADDING
    assert torch.equal(everything.run(batch).hidden_BMD, whole)
    if name not in ("visionzip", "prunesid", "prumerge"):  # these make tokens anew
        forced = everything.run(batch, force_gather=True)
        assert torch.equal(forced.rows.visible_BM, seen)
        torch.testing.assert_close(forced.hidden_BMD[seen], whole[seen], rtol=1e-5, atol=1e-5)
    if name != "none":
        text = make_batch([(0, 8), (0, 5)])
        reduced = compress(tiny_family, name=name, keep_ratio=0.75, **settings).run(text).hidden_BMD
        real = text.regions_BN != Region.PADDING
        torch.testing.assert_close(reduced[real], plain.run(text).hidden_BMD[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep_ratio", [0.5, 0.25, 0.125, 0.1])
def test_uniform_tokens_are_spread_over_the_picture(keep_ratio):
    """Gaps of three sizes, every part of 24 x 24 has its share, whatever stands before and however much is padded."""
    regions = torch.full((2, 600), int(Region.PADDING))
    regions[0, 3:579], regions[1, 20:596] = Region.VISUAL, Region.VISUAL
    keep = build_reducer("uniform", keep_ratio).select(look(regions))[0]
    assert torch.equal(keep[0, 3:579], keep[1, 20:596])
    picture = keep[0, 3:579]
    assert int(picture.sum()) == int(keep_ratio * 576)
    assert len(set(picture.nonzero().flatten().diff().tolist())) <= 3
    assert bool(((picture.view(4, 6, 4, 6).float().sum((1, 3)) - keep_ratio * 36).abs() < 3).all())
    less = build_reducer("uniform", keep_ratio / 2).select(look(regions))[0]
    assert bool((keep | ~less).all())  # a smaller budget keeps a part of a larger one


def test_reducers_score_without_a_graph():
    """Not even while the backbone trains: what a reducer computes for its ranking is never kept for a backward pass."""
    weight, graphs = torch.ones(6, requires_grad=True), []

    def row(layer):
        scores = weight * random_scores(0, 1, 6)
        graphs.append(scores.requires_grad)
        return scores

    regions = torch.full((1, 6), int(Region.VISUAL))
    view = View(regions_BN=regions, protected_BN=torch.zeros_like(regions).bool(), scout=row)
    assert build_reducer("fastv", 0.5).select(view)[0].sum() == 3
    assert graphs == [False]


BUILT = [
    ("quest", {"matches": 0.25}, "matches=0.25 is for matched anchors, which round up; set round_up: true"),
    *(("quest", {"round_up": True, "matches": at}, rf"reducer matches={at} must lie in \(0, 1\]") for at in (0, 1.5)),
    ("fast_v", {}, r"unknown reducer 'fast_v'\. Did you mean 'fastv'\?"),
    ("kvzop", {}, "unknown reducer 'kvzop'. Did you mean 'kvzip'"),
    ("quest", {"layer": 2}, r"setting of quest 'layer'\. .*Allowed: keep_ratio, matches, page_size, round_up"),
    ("none", {}, r"reducer 'none' keeps every token, but keep_ratio=0\.5; set it to 1"),
    *((name, {"keep_ratio": 1.01}, r"keep_ratio=1\.01 must lie in \(0, 1\]") for name in ("none", "random", "fastv")),
    *(("fastv", {"keep_ratio": ratio}, r"must lie in \(0, 1\]") for ratio in (0.0, -0.5, 25)),
    ("fastv", {"layer": 0}, "fastv layer is 0; it must be 1 to 10,000"),
    ("fastv", {"ranking": "froze"}, "'froze'.*'frozen'"),
    ("fastv", {"ranking": "frozen", "stage": "decoder"}, "stage: embeds, or reducer.ranking: adapted"),
    ("visionzip", {"merge_dropped": True}, "unknown setting of visionzip 'merge_dropped'"),
    ("dart", {"layer": 3}, "layer 3 is for DART's stage decoder, and stage 'embeds' reads no layer"),
    ("dart", {"stage": "tower"}, r"unknown dart stage 'tower'.*Allowed: decoder, embeds"),
    ("vispruner", {"important": 1.5}, r"vispruner important is 1\.5; it must be 0 to 1"),
    ("sparsevlm", {"version": 3}, "unknown sparsevlm version 3. Allowed: 1, 2"),
    ("pyramiddrop", {"stages": 1}, "pyramiddrop stages is 1; it must be 2 to 10,000"),
    ("fitprune", {"calibration": "nowhere.json"}, r"fitprune calibration nowhere\.json is not a file"),
    ("quest", {"page_size": 0}, "quest page_size is 0; it must be"),
    ("fastv", {"layer": "two"}, "fastv layer is 'two'; it must be 1 to 10,000"),
    ("compactor", {"sketch_seed": -1}, "compactor seed is -1"),
]
test_a_wrong_setting_is_refused_in_words = refusing(
    BUILT, lambda name, settings: build_reducer(name, **{"keep_ratio": 0.5, **settings})
)

FIT = [
    ("fastv", {"layer": 5}, "llava", 4, "with stage=embeds, layer=5, .*does not fit a model of 4 layers"),
    ("fastv", {"layer": 4, "stage": "decoder"}, "llava", 4, "with stage=decoder, layer=4, .*does not fit a model of 4"),
    ("pyramiddrop", {}, "llava", 3, "pyramiddrop: stages=4, but the model has 3 layers"),
    ("pyramiddrop", {"keep_ratio": 0.25}, "llava", 32,
     r"keep_ratio=0\.25 is the average over layers, and the first 8 of"),
    ("pyramiddrop", {}, "llama", 32, "reducer 'pyramiddrop' reduces visual tokens and llama has none"),
    ("compactor", {}, "llava", 32, "'compactor' evicts the context of a language model"),
    ("sparsevlm", {"keep_ratio": 0.09}, "llava", 32,
     r"the first 3 of 32 layers hold every token and make 9\.38% alone"),
    ("fitprune", {}, "llava", 40, r"published table is LLaVA-1\.5-7B's, of 32 layers, and this is llava of 40"),
    ("fitprune", {}, "llava_next", 32, "this is llava_next of 32; make its own: subtoken-train calibrate"),
    ("fitprune", {"keep_ratio": 0.1}, "llava", 32, r"lowest schedule of the published table has 0\.126465; raise it"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "family", "layers", "words"), FIT)
def test_a_backbone_that_does_not_fit_is_refused_in_words(name, settings, family, layers, words):
    reducer = build_reducer(name, **{"keep_ratio": 0.5, **settings})
    refuses(words, reducer.check_fit, family, sees_images=family != "llama", num_layers=layers)


LENGTHS = range(1, 401)
DEPTH = 32
GROUPS = [KVBudget(1.0, 16, 4), KVBudget(1.0, 16, 15), KVBudget(1.0, 8, 7), KVBudget(1.0, 12, 5)]
RATIOS = (0.25, 0.125, 0.07, 0.9)
STAGED = (0.5, 0.6, 0.9)  # averages over layers that all three reducers with several cuts reach
OWN = {"fastv": ({}, {"stage": "decoder"}), "quest": ({}, {"page_size": 7, "window": 5})}
CASES = [(name, own) for name in REDUCERS if name != "none" for own in OWN.get(name, ({},))]


def check_apart(name, own, groups, ratio, lengths):
    """In whole tokens of all layers, of which the layers below a cut hold every one in both arms."""
    routed, each = build_reducer(name, ratio, **own), groups.exact_total
    anchor, cut = matched_reducer(routed, groups, DEPTH, 100), routed.cut_layer(DEPTH)
    for tokens in lengths:
        ours, its = (reducer.layer_tokens(tokens, DEPTH) for reducer in (routed, anchor))
        assert ours[:cut] == its[:cut] == [tokens] * cut
        assert all(0 < low <= high <= tokens for counts in (ours, its) for high, low in pairwise(counts))
        assert 0 <= (sum(its[cut:]) - each * sum(ours[cut:])) / Fraction(DEPTH) < 1, (ratio, tokens, ours, its)


@sampled(("name", "own"), CASES, every=3)
def test_an_anchor_has_its_arms_bytes_and_less_than_a_token_more(name, own):
    staged = REDUCERS.find(name).staged
    for groups, ratio in zip(GROUPS, STAGED if staged else RATIOS, strict=False):
        check_apart(name, own, groups, ratio, LENGTHS[::23] if staged else LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "own"), CASES)
@pytest.mark.parametrize("groups", GROUPS, ids=lambda groups: f"S{groups.num_groups}K{groups.kept_groups}")
def test_it_does_at_every_length_and_ratio(name, own, groups):
    for ratio in STAGED if REDUCERS.find(name).staged else RATIOS:
        check_apart(name, own, groups, ratio, LENGTHS)


@pytest.mark.parametrize("name", [name for name in REDUCERS if issubclass(REDUCERS.find(name), TowerReducer)])
@pytest.mark.parametrize("per_mille", [1, 70, 250, 900])
def test_a_samples_images_share_its_budget_to_the_token(name, per_mille):
    """32 frames of 7 tokens at 25 % are 56 tokens; each rounded for itself, they would be 32."""
    sizes, samples, generator = [*[7] * 32, 9, 1, 4, 25], [32, 3, 0, 1], torch.Generator().manual_seed(0)
    tokens = [torch.randn(size, 5, generator=generator) for size in sizes]
    received, keys = [part[:, 0].sigmoid() for part in tokens], [part[:, 1:] for part in tokens]
    states = VisualStates(tokens, [part[0] for part in tokens], received, keys, images_per_sample=samples)
    merged = build_reducer(name, per_mille / 1000).merge(states, unread(states))
    counts = [len(part) for part in merged.tokens]
    assert counts == [int(slots_T.sum()) for slots_T in merged.slots]
    assert all(kept <= size for kept, size in zip(counts, sizes, strict=True))
    for first, end in pairwise(accumulate(samples, initial=0)):
        total = sum(sizes[first:end])
        assert sum(counts[first:end]) == (max(1, total * per_mille // 1000) if total else 0)
        assert first == end or counts[end - 1] > 0  # whose last row a token may be read from


def test_images_are_told_apart_by_their_samples_tokens():
    assert images_of_samples([0, 21, 9, 0, 5], [7, 7, 7, 9, 5]) == [0, 3, 1, 0, 1]


@pytest.mark.parametrize(("name", "settings"), [("fastv", {}), ("fastv", {"stage": "decoder"})])
@pytest.mark.parametrize("tokens", [64, 576])
def test_what_is_stored_once_per_sample_is_paid_for(name, settings, tokens):
    routed, budget = build_reducer(name, 0.25, **settings), KVBudget(1.0, 64, 12, fill="mean")
    anchor = matched_reducer(routed, budget, SHAPE.num_layers, tokens)
    cut = routed.cut_layer(SHAPE.num_layers)
    ours = nominal_ledger(SHAPE, {"visual": tokens}, budget, cut, routed.layer_tokens(tokens, 16)).bytes_of(None, False)
    its = nominal_ledger(SHAPE, {"visual": tokens}, KVBudget(), cut, anchor.layer_tokens(tokens, 16)).bytes_of()
    assert 0 <= its - ours < (SHAPE.num_layers - cut) * 2 * SHAPE.side_bytes
    assert tokens != 64 or anchor.kept_tokens(tokens) == 10 or cut


def test_cut_keys_are_cut_in_both():
    thin = KVBudget(1.0, 16, 4, key_channels=0.5)
    assert matched_reducer(build_reducer("fastv", 0.25), thin, 8, 576).keep_ratio == pytest.approx(0.25 * 0.75 / 1.5)


test_where_there_is_none_it_says_why = refusing(
    [
        (build_reducer("none"), "no token reducer"),
        (build_reducer("prumerge", 0.25, adaptive=True), "a different number of tokens"),
    ],
    lambda reducer: matched_reducer(reducer, KVBudget(1.0, 16, 1), 3, 576),
)
