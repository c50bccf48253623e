"""PyramidDrop against a plain reference written from the paper, its counts, what is refused, and how it trains."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.evaluation.diagnostics import diagnose
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.staged import stage_share
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress, gqa_family, make_batch, only_sample, sharpen
from tests.support.sampling import sampled

MIXED = [(1, 9), (2, 7), (0, 12)]
HALF = 0.46875  # in four stages, each keeps half of the one before


@pytest.fixture(params=["multi_head", "grouped_query"])
def stages(request, tiny_family):
    """A model, into how many stages it is cut, what the average is then, and where they start."""
    if request.param == "multi_head":
        family, made = tiny_family, (4, HALF, [(0, 1), (1, 2), (2, 3), (3, 4)])
    else:
        family, made = gqa_family(), (2, 0.75, [(0, 3), (3, 6)])
    sharpen(family)
    return family, *made


def softmax_row(family, layer, hidden_ND, position_N, asks):
    """Head-mean attention of one row over those up to it, from the layer's own projections, [asks + 1]."""
    block = family.decoder.layers[layer]
    attention, normed = block.self_attn, block.input_layernorm(hidden_ND[None, : asks + 1])
    heads = [
        projection(normed).view(1, asks + 1, -1, attention.head_dim).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj)
    ]
    cos, sin = family.decoder.rotary_emb(normed, position_N[None, : asks + 1])
    query, key = family.rotate(layer, *heads, (cos, sin))
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query[0, :, -1:] @ key[0].transpose(1, 2) * attention.head_dim**-0.5).softmax(-1).mean(0)[0]


@torch.no_grad()
def by_the_paper(family, batch, stages):
    """One sample: the rows of every stage, and the last layer's output, by loops."""
    hidden, regions = family.embed(batch)[0], batch.regions_BN[0].tolist()
    rows, asks, depth = list(range(len(regions))), int(batch.rank_position_B[0]), len(family.decoder.layers)
    count, held = regions.count(Region.VISUAL), []
    for stage in range(stages):
        held.append(rows)
        first, last = depth * stage // stages, depth * (stage + 1) // stages
        for layer in range(first, last):
            given, position = hidden, torch.tensor(rows)
            seen = torch.ones(1, len(rows), dtype=torch.bool)
            hidden = family.run_layers(hidden[None], seen, position[None], start=layer, stop=layer + 1)[0]
        if stage == stages - 1 or not count:
            continue
        place = rows.index(asks)
        row = softmax_row(family, last - 1, given, position, place)
        count = max(1, int(count / 2))
        visual = [i for i, n in enumerate(rows) if regions[n] == Region.VISUAL]
        best = sorted(visual, key=lambda i: -float(row[i]))[:count]
        keep = sorted({i for i in range(len(rows)) if regions[rows[i]] != Region.VISUAL} | set(best))
        hidden, rows = hidden[keep], [rows[i] for i in keep]
    return held, hidden


@sampled("pad_left", [False, True], every=4)
@torch.no_grad()
def test_stages_are_the_papers(stages, pad_left):
    family, number, average, spans = stages
    batch = make_batch(MIXED, pad_left)
    backbone = compress(family, name="pyramiddrop", keep_ratio=average, stages=number)
    result = backbone.run(batch, pad_left=pad_left)
    assert [(start, stop) for start, stop, _ in result.spans] == spans
    for sample in range(3):
        held, hidden = by_the_paper(family, only_sample(batch, sample), number)
        first = int((batch.regions_BN[sample] == Region.PADDING).sum()) if pad_left else 0
        for expected, (_, _, rows) in zip(held, result.spans, strict=True):
            assert (rows.index_BM[sample, rows.visible_BM[sample]] - first).tolist() == expected
            assert rows.position[sample, rows.visible_BM[sample]].tolist() == expected
        assert torch.allclose(result.hidden_BMD[sample, result.rows.visible_BM[sample]], hidden, atol=1e-5)
    assert [rows.visible_BM.sum(-1)[0] for _, _, rows in result.spans] == [75, 43, 27, 19][:number]


@torch.no_grad()
def test_a_prompt_that_ends_with_its_image_asks_with_its_last_row_and_keeps_it(tiny_family):
    batch = make_batch([(1, 2)])
    batch.regions_BN[0, -2:], batch.labels_BN[0] = Region.VISUAL, -100
    batch.rank_position_B[0] = batch.regions_BN.shape[1] - 1
    batch.regions_BN[0, 2:4] = Region.SYSTEM
    result = compress(tiny_family, name="pyramiddrop", keep_ratio=0.3).run(batch)
    assert all(rows.index_BM[0, -1] == batch.rank_position_B[0] for _, _, rows in result.spans)
    batch.followed = True
    assert compress(tiny_family, name="pyramiddrop", keep_ratio=0.3).run(batch).hidden_BMD.isfinite().all()


@pytest.mark.parametrize("budget", ["per_token", "ranked"])
def test_routers_act_from_the_first_cut_on_and_train(tiny_family, budget):
    config = RoutingConfig(num_groups=16, kept_groups=4, budget=budget)
    backbone = compress(tiny_family, config, name="pyramiddrop", keep_ratio=HALF)
    batch = make_batch(MIXED)
    result = backbone.run(batch)
    masks = result.state.masks
    assert sorted(masks) == [1, 2, 3]
    for layer, mask in masks.items():
        rows = result.spans[layer][2]
        visual = rows.regions_BM == Region.VISUAL
        assert mask.shape[1] == rows.index_BM.shape[1]
        assert visual.sum(-1).tolist() == [64 >> layer, 128 >> layer, 0]
        assert (mask & visual[..., None]).sum((1, 2)).tolist() == [4 * (64 >> layer), 4 * (128 >> layer), 0]
    balance = result.state.balances()
    assert balance.shape == (3, 3)
    alone = [compress(tiny_family, config, name="pyramiddrop", keep_ratio=HALF) for _ in range(3)]
    for sample, other in enumerate(alone):
        other.bank.load_state_dict(backbone.bank.state_dict())
        found = other.run(only_sample(batch, sample)).state.balances()
        assert torch.allclose(found[:, 0], balance[:, sample], atol=1e-5)
    (backbone.logits(result).square().mean() + result.state.mean_balance()).backward()
    gradients = [[p.grad for p in selector.parameters()] for selector in backbone.bank.selectors]
    assert all(grad is None for grad in gradients[0])
    assert all(grad is not None and grad.abs().sum() > 0 for layer in gradients[1:] for grad in layer)


@settings(max_examples=60, deadline=None)
@given(
    depth=st.integers(4, 40), stages=st.integers(2, 4), part=st.integers(1, 1000), tokens=st.integers(1, 700),
    up=st.booleans(),
)  # fmt: skip
def test_the_average_is_the_keep_ratio(depth, stages, part, tokens, up):
    """Counts fall; their average is the ratio, to less than a token, never above it (or below, rounded up)."""
    first = Fraction(depth // stages, depth)
    ratio = float(first + (1 - first) * Fraction(part, 1000))
    if ratio >= 1 or Fraction(str(ratio)) <= first:
        return
    counts = build_reducer("pyramiddrop", ratio, up, stages=stages).layer_tokens(tokens, depth)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == tokens
    assert counts[-1] >= 1
    mean = sum(counts) / depth
    assert ratio * tokens - 1e-4 - (not up) <= mean <= ratio * tokens + 1e-4 + (1 if up or min(counts) == 1 else 0)


def test_the_papers_counts():
    counts = build_reducer("pyramiddrop", HALF).layer_tokens(576, 32)
    assert counts == [576] * 8 + [288] * 8 + [144] * 8 + [72] * 8
    assert build_reducer("pyramiddrop", HALF, round_up=True).layer_tokens(576, 32) == counts
    assert stage_share((7, 7, 7, 7), Fraction(15, 32), False) == Fraction(1, 2)
    assert build_reducer("pyramiddrop", HALF).kept_words(576, 32) == "288 to 72"


def test_a_matched_anchor_holds_the_same_share():
    """Layers below the first cut hold all in both; the arm's others hold whole keys and a quarter of the values."""
    arm = build_reducer("pyramiddrop", HALF)
    held = Fraction(1, 4) + (arm.mean_share(32) - Fraction(1, 4)) * Fraction(5, 8)
    anchor = arm.at_share(held, 32)
    assert (anchor.keep_ratio, anchor.round_up) == (0.38671875, True)
    assert sum(anchor.layer_tokens(576, 32)) / (576 * 32) >= held
    with pytest.raises(ValueError, match=r"the first 8 of 32 layers hold every token"):
        arm.at_share(Fraction(1, 5), 32)


def test_stretches_of_different_rows_are_diagnosed(tiny_family):
    backbone = compress(tiny_family, RoutingConfig(num_groups=16, kept_groups=4), name="pyramiddrop", keep_ratio=HALF)
    found = diagnose(backbone.eval(), [make_batch(MIXED)])
    assert found.layers == [1, 2, 3]
    assert found.counts_LS.sum(-1).tolist() == [4 * 96, 4 * 48, 4 * 24]
    # 32 and 64 tokens in layer 1, half of each in layer 2, and again
    expected = [sum(rank < tokens >> layer for layer in (1, 2, 3) for tokens in (64, 128)) for rank in range(64)]
    assert found.rank_tokens_R.tolist()[:64] == expected
