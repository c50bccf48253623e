"""DivPrune, CDPruner and DART in every family that sees images, against plain loops over what the model computes."""

from itertools import product

import pytest
import torch

from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region
from subtoken_train.view.view import View
from tests.support.helpers import compress, only_sample, random_scores
from tests.support.plain_choices import by_determinants, by_max_min, by_pivots, by_relevance
from tests.support.sampling import sampled
from tests.support.truth_models import FAMILIES, TEXT, family_of, prompts

NAMES = ["divprune", "cdpruner", "dart"]
SEEING = [name for name in FAMILIES if name not in TEXT]


def expected(name, count, rows, asking):
    """Places among the visual rows that stay, in the order of choice."""
    if name == "divprune":
        return by_max_min(rows, count)
    if name == "cdpruner":
        return by_determinants(rows, by_relevance(rows, asking), count)
    return by_pivots(rows, rows.abs().sum(-1), [(row, row.abs().sum()) for row in asking], count)


def by_sample(batch, states):
    """(visual rows' places, their states, the question's states) of every sample that shows something."""
    places = torch.arange(batch.regions_BN.shape[1])
    for codes, last, rows in zip(batch.regions_BN, batch.rank_position_B, states, strict=True):
        visual = (codes == Region.VISUAL).nonzero()[:, 0]
        yield visual, rows[visual].float(), rows[(codes == Region.QUERY) & (places <= last)].float()


@sampled("family_name, name, pad_left", product(SEEING, NAMES, [False, True]), every=5)
@torch.no_grad()
def test_every_family_keeps_what_the_loops_choose_of_its_embeddings(family_name, name, pad_left):
    """Pictures of several sizes, one or two in a prompt; what stays keeps its place, and a sample is the same alone."""
    family = family_of(family_name)
    batch = prompts(family, "three", pad_left)
    backbone = compress(family, name=name, keep_ratio=0.5)
    result, own = backbone.run(batch, pad_left=pad_left), family.positions(batch)
    for i, (visual, rows, asking) in enumerate(by_sample(batch, family.embed(batch))):
        count = backbone.reducer.kept_tokens(len(visual))
        real = result.rows.visible_BM[i]
        kept = result.rows.index_BM[i, real]
        chosen = kept[batch.regions_BN[i, kept] == Region.VISUAL]
        assert chosen.tolist() == visual[expected(name, count, rows, asking)].sort().values.tolist()
        assert torch.equal(result.rows.position[..., i, real], own[..., i, kept])
        if family.in_tiles and batch.image_grid_I3 is None:  # its tiles are not told apart by the support
            continue
        alone = backbone.run(only_sample(batch, i))
        torch.testing.assert_close(alone.hidden_BMD[0], result.hidden_BMD[i, real], rtol=1e-3, atol=1e-4)


def look(embeds, codes, read=(), last=None):
    """A view of one sample without attention: asking for any is an error."""
    regions = torch.tensor([codes])
    marks = torch.tensor([[place in read for place in range(len(codes))]])
    last = torch.tensor([len(codes) - 1 if last is None else last])
    return View(regions_BN=regions, protected_BN=marks, rank_position_B=last, hidden_BND=embeds)


S, V, Q, P = (int(each) for each in (Region.SYSTEM, Region.VISUAL, Region.QUERY, Region.PADDING))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token_stays_of_any_picture_and_alike_ones_go_by_their_index(name, dtype):
    codes, reducer = [P, S, V, V, V, V, V, V, Q, Q], build_reducer(name, 0.001)
    assert reducer.select(look(random_scores(0, 1, 10, 6, dtype=dtype), codes))[0].sum() == 4
    alike = torch.ones(1, 10, 6, dtype=dtype)
    assert reducer.select(look(alike, codes))[0][0].nonzero()[:, 0].tolist() == [1, 2, 8, 9]
    half = build_reducer(name, 0.5).select(look(alike, codes))[0]
    assert half[0].nonzero()[:, 0].tolist() == [1, 2, 3, 4, 8, 9]
    single = reducer.select(look(random_scores(1, 1, 3, 6, dtype=dtype), [S, V, Q]))[0]
    assert single.all()


@pytest.mark.parametrize("name", NAMES)
def test_a_row_that_a_token_is_read_from_takes_the_place_of_the_last_choice(name):
    """Without a question, too: then CDPruner is diversity alone, and DART has pivots in the image only."""
    embeds, codes = random_scores(3, 1, 9, 6), [S, *[V] * 8]
    order = expected(name, 4, embeds[0, 1:], [])
    for read in range(8):
        keep, rank, _ = build_reducer(name, 0.5).select(look(embeds, codes, {read + 1}))
        kept = order if read in order else [*order[:3], read]
        assert keep[0].nonzero()[:, 0].tolist() == [0, *sorted(place + 1 for place in kept)]
        if name != "dart" and read in order:
            assert [int(rank[0, place + 1]) for place in order] == [0, 1, 2, 3]


def test_cdpruner_and_dart_follow_the_question_and_never_the_answer():
    embeds, codes = random_scores(5, 1, 30, 6), [S, *[V] * 20, *[Q] * 9]
    for name in ("cdpruner", "dart"):
        reducer, answered, asked = build_reducer(name, 0.6), embeds.clone(), embeds.clone()
        answered[:, 26:] *= -3
        asked[:, 21:26] *= -3
        kept = reducer.select(look(embeds, codes, last=25))[0]
        assert torch.equal(reducer.select(look(answered, codes, last=25))[0], kept)
        assert not torch.equal(reducer.select(look(asked, codes, last=25))[0], kept)


@pytest.mark.parametrize("name", ["llava_gqa", "qwen2_5_vl"])
@pytest.mark.parametrize("layer", [1, 2])
@torch.no_grad()
def test_dart_in_the_decoder_reads_the_layer_below_as_transformers_computes_it(name, layer):
    """Rotated keys, and its output after the last norm."""
    family, seen = family_of(name), {}
    batch = only_sample(prompts(family, "three", pad_left=False), 1)
    backbone = compress(family, name="dart", keep_ratio=0.4, stage="decoder", layer=layer)
    rows = backbone.run(batch).spans[-1][2]
    hook = family.decoder.layers[layer - 1].register_forward_hook(lambda _m, _a, out: seen.update(out=out))
    cache = compress(family).run(batch, cache=family.dense_cache())
    hook.remove()
    del cache
    keys = _keys(family, batch, layer - 1)
    states, norms = family.decoder.norm(seen["out"])[0], keys.abs().sum((1, 3))[0]
    visual = (batch.regions_BN[0] == Region.VISUAL).nonzero()[:, 0]
    asking = (batch.regions_BN[0] == Region.QUERY).nonzero()[:, 0]
    text = [(states[row], norms[row]) for row in asking]
    chosen = by_pivots(states[visual], norms[visual], text, backbone.reducer.kept_tokens(len(visual)))
    kept = rows.index_BM[0]
    assert kept[batch.regions_BN[0, kept] == Region.VISUAL].tolist() == visual[chosen].sort().values.tolist()


def _keys(family, batch, layer):
    """The dense keys of a layer, [1, h, N, d]."""
    cache = family.dense_cache()
    compress(family).run(batch, cache=cache)
    return cache.layers[layer].keys
