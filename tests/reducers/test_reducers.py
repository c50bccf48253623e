"""What every reducer does: exact counts, only visual tokens leave; and the ``none`` and ``random`` reducers."""

from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.families.family import shapes_digest
from subtoken_train.reducers import REDUCERS, build_reducer, split_settings
from subtoken_train.reducers.fitprune import PruneSchedules
from subtoken_train.types import Identity, Region
from subtoken_train.view.view import View
from tests.support.helpers import compress, make_batch, only_sample, random_scores
from tests.support.kvzap_files import written

MIXED = [(1, 9), (2, 7), (0, 12)]


def look(regions_BN, scores_BN=None, seeds=None):
    batch = len(regions_BN)
    seeds = torch.arange(batch) + 1 if seeds is None else seeds
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
    reducer = build_reducer("fastv", thousandths / 1000, round_up)
    keep = reducer.select(look(regions, scores))[0]
    for sample in range(sizes[0]):
        codes = regions[sample].tolist()
        visual = [n for n, code in enumerate(codes) if code == Region.VISUAL]
        up = -(-len(visual) * thousandths // 1000)
        count = min(len(visual), max(1, up if round_up else len(visual) * thousandths // 1000))
        best = sorted(visual, key=lambda n: (-float(scores[sample, n]), n))[:count]
        others = [n for n, code in enumerate(codes) if code not in {Region.VISUAL, Region.PADDING}]
        assert keep[sample].nonzero().flatten().tolist() == sorted(best + others)


@pytest.mark.parametrize(
    ("keep_ratio", "tokens", "down", "up"),
    [
        (0.1, 10, 1, 1),
        (0.1, 9, 1, 1),  # never nothing of something
        (0.1, 11, 1, 2),
        (0.07, 100, 7, 7),  # 7.000000000000001 in binary
        (0.29, 100, 29, 29),  # 28.999999999999996 in binary
        (0.15625, 64, 10, 10),
        (0.15625, 100, 15, 16),
        (1.0, 7, 7, 7),
    ],
)
def test_kept_counts_round_exactly(keep_ratio, tokens, down, up):
    assert build_reducer("random", keep_ratio).kept_tokens(tokens) == down
    assert build_reducer("random", keep_ratio, round_up=True).kept_tokens(tokens) == up


def test_a_setting_is_one_of_the_methods_own():
    common = {"keep_ratio": 0.5, "round_up": False, "matches": None}
    assert asdict(build_reducer("visionzip", 0.5)) == {"name": "visionzip", **common}


def test_records_of_every_methods_settings_are_split():
    union = {"name": "quest", "keep_ratio": 0.5, "stage": "embeds", "layer": 2, "seed": 0, "page_size": 8, "window": 64}
    own = {"name": "quest", "keep_ratio": 0.5, "page_size": 8, "window": 64}
    assert split_settings(union) == (own, {})
    assert split_settings({**union, "layer": 3}) == (own, {"layer": 3})
    dart = {"name": "dart", "keep_ratio": 0.5, "stage": "decoder", "layer": 3}
    assert split_settings(dart) == (dart, {})
    mine = {"name": "of another package", "seed": 0}
    assert split_settings(mine) == (mine, {})


WHOLE = [name for name in REDUCERS if name not in ("quest", "evs", "vidcom2")]


@pytest.mark.parametrize(("name", "settings"), [(name, {}) for name in WHOLE] + [("sparsevlm", {"version": 2})])
@torch.no_grad()
def test_everything_kept_is_the_backbone_also_through_the_gather(tiny_family, tmp_path, name, settings):
    if name == "fitprune":
        own = Identity("made/here", None, "llava", shapes_digest(tiny_family))
        settings = {"calibration": written(tmp_path / "f.json", name, PruneSchedules([[1, 0.75, 0.75, 0.5]]), own)}
    batch = make_batch(MIXED)
    plain, everything = compress(tiny_family), compress(tiny_family, name=name, keep_ratio=1.0, **settings)
    whole, seen = plain.run(batch).hidden_BMD, batch.regions_BN != Region.PADDING
    assert torch.equal(everything.run(batch).hidden_BMD, whole)
    if name not in ("visionzip", "prumerge"):  # these make tokens anew
        forced = everything.run(batch, force_gather=True)
        assert torch.equal(forced.rows.visible_BM, seen)
        torch.testing.assert_close(forced.hidden_BMD[seen], whole[seen], rtol=1e-5, atol=1e-5)
    if name != "none":
        text = make_batch([(0, 8), (0, 5)])
        reduced = compress(tiny_family, name=name, keep_ratio=0.75, **settings).run(text).hidden_BMD
        real = text.regions_BN != Region.PADDING
        torch.testing.assert_close(reduced[real], plain.run(text).hidden_BMD[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pad_left", [False, True])
@torch.no_grad()
def test_random_is_the_samples_own_in_any_batch(tiny_family, pad_left):
    batch = make_batch([(1, 9), (1, 4), (2, 7)], pad_left)
    backbone = compress(tiny_family, name="random", keep_ratio=0.25)

    def visual_positions(some):
        rows = backbone.run(some).rows
        marked = rows.regions_BM == Region.VISUAL
        return [position[mark].tolist() for position, mark in zip(rows.position, marked, strict=True)]

    together = visual_positions(batch)
    assert together == [visual_positions(only_sample(batch, sample))[0] for sample in range(3)]
    assert together[0] != together[1]
    assert [len(kept) for kept in together] == [16, 16, 32]


def test_random_depends_on_seed_and_sample_and_covers_all_positions():
    regions = torch.full((400, 20), int(Region.VISUAL))
    seeds = torch.arange(400)
    keep = build_reducer("random", 0.25).select(look(regions, seeds=seeds))[0]
    assert (keep.sum(-1) == 5).all()
    assert ((keep.float().mean(0) - 0.25).abs() < 0.1).all()  # standard error 0.022
    other = build_reducer("random", 0.25, seed=1).select(look(regions, seeds=seeds))[0]
    assert not torch.equal(keep, other)


@pytest.mark.parametrize("keep_ratio", [0.5, 0.25, 0.125, 0.1])
def test_uniform_tokens_are_spread_over_the_picture(keep_ratio):
    """Gaps of three sizes, every part of 24 x 24 has its share, whatever stands before and however much is padded."""
    regions = torch.full((2, 600), int(Region.PADDING))
    regions[0, 3:579], regions[1, 20:596] = Region.VISUAL, Region.VISUAL
    reducer = build_reducer("uniform", keep_ratio)
    keep = reducer.select(look(regions))[0]
    assert torch.equal(keep[0, 3:579], keep[1, 20:596])
    picture = keep[0, 3:579]
    assert int(picture.sum()) == int(keep_ratio * 576)
    assert len(set(picture.nonzero().flatten().diff().tolist())) <= 3
    parts = picture.view(4, 6, 4, 6).float().sum((1, 3))
    assert bool(((parts - keep_ratio * 36).abs() < 3).all())
    less = build_reducer("uniform", keep_ratio / 2).select(look(regions))[0]
    assert bool((keep | ~less).all())  # a smaller budget keeps a part of a larger one


@pytest.mark.parametrize("name", ["fastv", "random", "uniform"])
def test_the_ranking_is_that_of_the_scores(name):
    regions = torch.tensor([[Region.SYSTEM, *[Region.VISUAL] * 6, Region.QUERY, Region.PADDING]] * 2)
    reducer, view = build_reducer(name, 0.5), look(regions, random_scores(0, 2, 9, levels=3))
    keep, rank, _ = reducer.select(view)
    scores = reducer.scores(view)
    for sample in range(2):
        order = sorted(range(1, 7), key=lambda n: (-float(scores[sample, n]), n))
        assert [int(rank[sample, n]) for n in order[:3]] == list(range(3))
        assert keep[sample].nonzero().flatten().tolist() == sorted([0, 7, *order[:3]])
    assert torch.equal(reducer.select(view)[0], keep)


@pytest.mark.parametrize("name", ["fastv", "random"])
def test_a_row_that_a_token_is_read_from_stays_inside_the_budget(name):
    """The last token of a prompt that ends with its image, however little it scores; it ranks by its score."""
    regions = torch.tensor([[Region.SYSTEM, *[Region.VISUAL] * 6]] * 40)
    seeds, scores = torch.arange(40), random_scores(0, 40, 7)
    view = look(regions, scores, seeds)
    view.protected_BN[:, 6] = True
    reducer = build_reducer(name, 0.5)
    keep, rank, _ = reducer.select(view)
    scores = reducer.scores(view)
    for sample in range(40):
        order = sorted(range(1, 6), key=lambda n: -float(scores[sample, n]))[:2]
        kept = sorted([*order, 6], key=lambda n: -float(scores[sample, n]))
        assert keep[sample].nonzero().flatten().tolist() == sorted([0, *kept])
        assert [int(rank[sample, n]) for n in kept] == [0, 1, 2]
    assert len({int(each) for each in rank[:, 6]}) == 3


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
