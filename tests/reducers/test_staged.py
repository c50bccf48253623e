"""PyramidDrop, FitPrune and SparseVLM beside plain loops and the release; counts, tables, places, training."""

from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.evaluation.diagnostics import diagnose
from subtoken_train.families.family import shapes_digest
from subtoken_train.reducers import build_reducer, staged
from subtoken_train.reducers.base import keep_ranked
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Identity, Region
from subtoken_train.view.view import View
from tests.support.golden_cases import alike, load, near
from tests.support.helpers import compress, gqa_family, make_batch, only_sample, random_scores, sharpen
from tests.support.plain_choices import clusters_by_loop
from tests.support.prompt_views import written
from tests.support.refusals import refusing
from tests.support.sampling import sampled
from tests.support.tiny.qwen import qwen_family
from tests.support.truth_models import prompts

MIXED = [(1, 9), (2, 7), (0, 12)]
HALF = 0.46875  # in four stages, each keeps half of the one before
SHARES = [[1, 0.75, 0.75, 0.5], [1, 0.5, 0.25, 0.25]]  # averages 0.75 and 0.5


@pytest.fixture(params=["multi_head", "grouped_query"])
def stages(request, tiny_family):
    """A model, into how many stages it is cut, what the average is then, and where they start."""
    if request.param == "multi_head":
        family, made = tiny_family, (4, HALF, [(0, 1), (1, 2), (2, 3), (3, 4)])
    else:
        family, made = gqa_family(), (2, 0.75, [(0, 3), (3, 6)])
    sharpen(family)
    return family, *made


def layer_attention(family, layer, hidden_ND, rows):
    """Attention of one sample from the layer's own projections, causal, [H, N, N]."""
    block = family.decoder.layers[layer]
    attention, normed = block.self_attn, block.input_layernorm(hidden_ND[None])
    query, key = (
        made(normed).view(1, len(rows), -1, attention.head_dim).transpose(1, 2)
        for made in (attention.q_proj, attention.k_proj)
    )
    query, key = family.rotate(layer, query, key, family.decoder.rotary_emb(normed, torch.tensor(rows)[None]))
    logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * attention.head_dim**-0.5
    return logits.masked_fill(torch.ones(len(rows), len(rows)).triu(1).bool(), -torch.inf).softmax(-1)[0]


def by_stages(family, batch, stops, counts, score):
    """One sample: the rows of every stage, and the last layer's output; so many visual tokens go on after each."""
    hidden, regions, asks = family.embed(batch)[0], batch.regions_BN[0].tolist(), int(batch.rank_position_B[0])
    rows, held = list(range(len(regions))), []
    for start, stop, count in zip([0, *stops], stops, [*counts, None], strict=False):
        held.append(rows)
        seen, position = torch.ones(1, len(rows), dtype=torch.bool), torch.tensor(rows)[None]
        for layer in range(start, stop):
            given, hidden = hidden, family.run_layers(hidden[None], seen, position, start=layer, stop=layer + 1)[0]
        visual = [i for i, n in enumerate(rows) if regions[n] == Region.VISUAL]
        if count is None or not visual:
            continue
        after = [i for i, n in enumerate(rows) if i > visual[0] and i not in visual and n <= asks]
        value = score(layer_attention(family, stop - 1, given, rows), visual, after, rows.index(asks))
        best = sorted(visual, key=lambda i: -float(value[i]))[:count]
        keep = sorted({i for i in range(len(rows)) if i not in visual} | set(best))
        hidden, rows = hidden[keep], [rows[i] for i in keep]
    return held, hidden


def check_stages(backbone, pad_left, stops, counts_of, score):
    """Every sample of a batch holds in each stage what it holds by a loop over it alone."""
    batch = make_batch(MIXED, pad_left)
    result = backbone.run(batch, pad_left=pad_left)
    for sample, tokens in enumerate((64, 128, 0)):
        held, hidden = by_stages(backbone.family, only_sample(batch, sample), stops, counts_of(tokens), score)
        first = int((batch.regions_BN[sample] == Region.PADDING).sum()) if pad_left else 0
        for expected, (_, _, rows) in zip(held, result.spans, strict=True):
            seen = rows.visible_BM[sample]
            assert (rows.index_BM[sample, seen] - first).tolist() == rows.position[sample, seen].tolist() == expected
        assert torch.allclose(result.hidden_BMD[sample, result.rows.visible_BM[sample]], hidden, atol=1e-5)
    return result


@sampled("pad_left", [False, True], every=4)
def test_stages_are_the_papers(stages, pad_left):
    family, number, average, spans = stages
    backbone = compress(family, name="pyramiddrop", keep_ratio=average, stages=number)

    def counts(tokens):
        return [max(1, tokens >> stage) for stage in range(1, number)]

    stops = [stop for _, stop in spans]
    result = check_stages(backbone, pad_left, stops, counts, lambda paid, visual, after, asks: paid[:, asks].mean(0))
    assert [(start, stop) for start, stop, _ in result.spans] == spans
    assert [rows.visible_BM.sum(-1)[0] for _, _, rows in result.spans] == [75, 43, 27, 19][:number]


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
    assert staged.stage_share((7, 7, 7, 7), Fraction(15, 32), False) == Fraction(1, 2)
    assert build_reducer("pyramiddrop", HALF).kept_words(576, 32) == "288 to 72"


def test_stretches_of_different_rows_are_diagnosed(tiny_family):
    backbone = compress(tiny_family, RoutingConfig(num_groups=16, kept_groups=4), name="pyramiddrop", keep_ratio=HALF)
    found = diagnose(backbone.eval(), [make_batch(MIXED)])
    assert found.layers == [1, 2, 3]
    assert found.counts_LS.sum(-1).tolist() == [4 * 96, 4 * 48, 4 * 24]
    # 32 and 64 tokens in layer 1, half of each in layer 2, and again
    expected = [sum(rank < tokens >> layer for layer in (1, 2, 3) for tokens in (64, 128)) for rank in range(64)]
    assert found.rank_tokens_R.tolist()[:64] == expected


def view_of(regions, attention, count, last):
    """A cut's view of one layer's attention [B, H, N, N]."""

    def blocks(marks_BN):
        for row in range(marks_BN.shape[1]):
            yield torch.where(marks_BN[:, row : row + 1], row, -1), attention[:, :, row : row + 1]

    last_B, counts = (torch.full((len(regions),), number) for number in (last, count))
    unread = torch.zeros_like(regions).bool()
    return View(
        layer=1, regions_BN=regions, protected_BN=unread, rank_position_B=last_B, count_B=counts, attention=blocks
    )


def test_golden_block(shared):
    params, tensors = load(shared, "fitprune")
    system, visual = params["system_tokens"], params["n_visual"]
    length = tensors["attn_weights"].shape[-1]
    regions = torch.full((len(tensors["attn_weights"]), length), int(Region.QUERY))
    regions[:, :system], regions[:, system : system + visual] = Region.SYSTEM, Region.VISUAL
    view = view_of(regions, tensors["attn_weights"], visual - params["n_delete"], length - 1)
    self_BN, cross_BN, asks_B = staged.attention_masses(view)
    image = slice(system, system + visual)
    assert asks_B.all()
    near("fitprune", "fitprune: self score", self_BN[0, image], tensors["self_score"], rtol=1e-5)
    # the release leaves out the number of text rows, which ranks alike
    ratio = tensors["cross_score"] / cross_BN[0, image]
    assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-5)
    alike("fitprune", "fitprune", build_reducer("fitprune", 0.5).cut(view).keep_BM[0], tensors["keep_mask"])


def test_golden_tables(shared):
    tensors = load(shared, "fitprune")[1]
    alike("fitprune", "fitprune: published counts", torch.tensor(staged.PUBLISHED), tensors["delete_scheme_table"][1:])
    for row in staged.PUBLISHED:
        held = list(accumulate(row[:-1], lambda left, gone: left - gone, initial=576))
        share = Fraction(sum(held), 32 * 576)
        reducer = build_reducer("fitprune", float(share))
        assert sum(abs(a - b) for a, b in zip(reducer.layer_tokens(576, 32), held, strict=True)) <= 32
        assert sum(build_reducer("fitprune", min(1.0, float(share) + 0.02)).layer_tokens(576, 32)) > sum(held)


@pytest.mark.parametrize("ratio", [0.95, 0.6, 0.5, 0.25, 0.13])
def test_the_average_is_the_keep_ratio_of_fitprune(ratio):
    shares = build_reducer("fitprune", ratio).layer_shares(32)
    assert sum(shares) / 32 == Fraction(str(ratio))
    assert shares == sorted(shares, reverse=True)
    assert build_reducer("fitprune", 1.0).layer_tokens(576, 32) == [576] * 32


@pytest.mark.parametrize("pad_left", [False, True])
def test_layers_are_the_releases(tiny_family, tmp_path, pad_left):
    sharpen(tiny_family)
    own = Identity("made/here", None, "llava", shapes_digest(tiny_family))
    file = written(tmp_path / "fit.json", "fitprune", staged.PruneSchedules(SHARES), own)
    backbone = compress(tiny_family, name="fitprune", keep_ratio=0.5, calibration=file)

    def score(paid, visual, after, asks):
        largest = paid.amax(0)
        return largest[visual].sum(0) * largest[after].sum(0)

    check_stages(backbone, pad_left, [1, 2, 3, 4], lambda tokens: [int(tokens * x) for x in SHARES[1][1:]], score)


test_numbers_of_a_file_are_checked = refusing(
    [
        ([[0.9, 0.5]], r"shares\[0\] must start at 1 and never rise"),
        ([[1, 0.5, 0.6]], r"shares\[0\] must start at 1 and never rise"),
        ([[1, 0.0]], r"shares\[0\] ends at 0; the last layer holds something"),
        ([[1, 0.5], [1, 0.7]], r"rows of falling averages below 1"),
        ([[1, 1.0]], r"rows of falling averages below 1"),
        ([[1, float("nan")]], r"shares\[0\]\[1\] is nan"),
    ],
    staged.PruneSchedules,
)

RELEASED = {1: [(300, 200, 110), (303, 110, 36), (238, 48, 26), (66, 30, 17)], 2: staged.LISTS[2]}


def test_golden_raters(shared):
    _, tensors = load(shared, "sparsevlm")
    mean = (tensors["visual_hidden"] @ tensors["text_hidden"].mT).softmax(-1).mean(1)
    near("sparsevlm", "sparsevlm: raters", mean, tensors["rater_mean"])
    for visual, text in zip(tensors["visual_hidden"], tensors["text_hidden"], strict=True):
        assert torch.equal(staged.text_raters(visual, text).nonzero()[:, 0], tensors["text_rater_idx"])


def test_golden_scores_and_masks(shared):
    """All three are of the whole image, as the golden takes them."""
    params, tensors = load(shared, "sparsevlm")
    logits = tensors["queries"] @ tensors["keys"].mT * params["logit_scale"]
    length, start, count = logits.shape[-1], params["pre"], params["n_visual"]
    attention = logits.masked_fill(~torch.ones(length, length).bool().tril(), -torch.inf).softmax(-1)
    regions = torch.full((1, length), int(Region.QUERY))
    regions[:, :start], regions[:, start : start + count] = Region.SYSTEM, Region.VISUAL
    asking = torch.zeros(1, length, dtype=torch.bool)
    asking[0, start + count + tensors["text_rater_idx"]] = True

    def blocks(marks):
        for row in marks[0].nonzero()[:, 0].split(4):
            yield row[None], attention[:, :, row]

    def pulls(marks):
        return (torch.ones(1, len(row), length) for row in marks[0].nonzero()[:, 0].split(4))

    nothing = torch.zeros_like(asking)
    for layer, keep in zip(params["layers"], params["keep"], strict=True):
        view = View(layer=layer + 1, regions_BN=regions, raters_BN=asking, attention=blocks, rotary_pull=pulls)
        scores = build_reducer("sparsevlm", 0.5).scores(view)
        near("sparsevlm", "sparsevlm: scores", scores[:, start : start + count], tensors[f"score_layer{layer}"])
        mask = keep_ranked(scores, regions, nothing, torch.tensor([keep]), False)[0][:, start : start + count]
        alike("sparsevlm", "sparsevlm", mask, tensors[f"mask_layer{layer}"])


@pytest.mark.parametrize("version", [1, 2])
def test_lists_are_the_releases_at_their_own_averages(version):
    """Version 1 holds the recycled tokens too: a tenth of 30 % of what leaves."""
    for kept, held in zip(RELEASED[version], staged.LISTS[version], strict=True):
        before = 576
        for keep, left in zip(kept, held, strict=True):
            assert left == keep + (0 if version == 2 else int((int((before - keep) * 0.3) + 1) / 10) + 1)
            assert version == 2 or staged.kept_of(before, left) == keep
            before = left
        average = Fraction(3 * 576 + 4 * held[0] + 9 * held[1] + 16 * held[2], 32 * 576)
        tokens = build_reducer("sparsevlm", average, version=version).layer_tokens(576, 32)
        assert tokens == [576] * 3 + [held[0]] * 4 + [held[1]] * 9 + [held[2]] * 16


@given(st.integers(2, 100), st.fractions(0, 1), st.sampled_from([1, 2]), st.integers(1, 600))
@settings(max_examples=60, deadline=None)
def test_shares_fall_and_average_to_the_keep_ratio(depth, part, version, tokens):
    first = build_reducer("sparsevlm", version=version).cuts(depth)[0]
    ratio = float(Fraction(first, depth) + part * (1 - Fraction(first, depth)))
    reducer = build_reducer("sparsevlm", max(ratio, first / depth + 1e-3), version=version)
    shares = reducer.layer_shares(depth)
    assert sum(shares) / depth == Fraction(str(reducer.keep_ratio))
    assert all(more >= less > 0 for more, less in pairwise(shares))
    assert shares[:first] == [1] * first
    assert reducer.layer_tokens(tokens, depth)[-1] >= 1


@given(st.integers(1, 700), st.integers(1, 700))
def test_what_stays_and_what_is_recycled_make_the_count(tokens, left):
    left = min(tokens, left)
    kept = staged.kept_of(tokens, left)
    assert 1 <= kept <= left
    recycled = staged.recycled_counts
    assert kept + recycled(tokens - kept)[1] == left or kept == left < 1 + recycled(tokens - 1)[1]


def rated(family, layer, hidden, places, raters, visual, version, heads):
    """What the raters make of the visual rows in a layer, by the whole matrix of every head."""
    paid = layer_attention(family, layer, hidden, places)[:, raters][..., visual]
    if version == 1:
        return paid.mean((0, 1))
    attention = family.decoder.layers[layer].self_attn
    ones = torch.ones(1, 1, len(places), attention.head_dim)
    _, ones = family.rotate(layer, ones, ones, family.decoder.rotary_emb(hidden[None], torch.tensor(places)[None]))
    per_head = (paid / (ones[0, 0, raters] @ ones[0, 0, visual].T * attention.scaling)).mean(1)
    return per_head[per_head.sum(1).argsort(descending=True)[:heads]].mean(0)


def by_the_release(family, batch, reducer):
    """One sample: rows and positions of every stage, and the last layer's output."""
    hidden, regions = family.embed(batch)[0], batch.regions_BN[0].tolist()
    depth, rows = len(family.decoder.layers), list(range(len(regions)))
    text = [n for n in rows if regions[n] == Region.QUERY and n <= int(batch.rank_position_B[0])]
    image = [n for n in rows if regions[n] == Region.VISUAL]
    nearness = (hidden[image] @ hidden[text].T).softmax(-1).mean(0)
    asking = [n for n, value in zip(text, nearness, strict=True) if value > nearness.mean()]
    places, stages, start = list(rows), [], 0
    counts = reducer.layer_tokens(len(image), depth)
    for stop in (*reducer.cuts(depth), depth):
        stages.append((rows, places))
        for layer in range(start, stop):
            given, seen, position = hidden, torch.ones(1, len(rows)).bool(), torch.tensor(places)[None]
            hidden = family.run_layers(hidden[None], seen, position, start=layer, stop=layer + 1)[0]
        start = stop
        if stop == depth:
            break
        visual = [i for i, n in enumerate(rows) if regions[n] == Region.VISUAL]
        raters = [i for i, n in enumerate(rows) if n in asking]
        score = rated(family, stop - 1, given, places, raters, visual, reducer.version, reducer.heads)
        order = [visual[i] for i in sorted(range(len(visual)), key=lambda i: -float(score[i]))]
        stays, left = set(order[: counts[stop]]), counts[stop]
        if reducer.version == 1:
            kept = max(k for k in range(1, left + 1) if k + int((int((len(order) - k) * 0.3) + 1) / 10) + 1 <= left)
            again = order[kept : kept + int((len(order) - kept) * 0.3) + 1]
            centres, cluster = clusters_by_loop(hidden[again], left - kept)
            means = [
                hidden[[row for row, own in zip(again, cluster, strict=True) if own == c]].mean(0)
                for c in range(left - kept)
            ]
            stays = set(order[:kept]) | {again[centre] for centre in centres}
            hidden = hidden.index_copy(0, torch.tensor([again[centre] for centre in centres]), torch.stack(means))
        keep = [i for i in range(len(rows)) if i in stays or regions[rows[i]] != Region.VISUAL]
        hidden, rows = hidden[keep], [rows[i] for i in keep]
        places = [places[i] for i in keep] if reducer.version == 2 else [*range(len(regions) - len(keep), len(regions))]
    return stages, hidden


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("heads", ["multi_head", "grouped_query"])
def test_a_pass_is_the_releases_whatever_the_batch_and_the_padding(tiny_family, heads, version, pad_left):
    family = tiny_family if heads == "multi_head" else gqa_family()
    sharpen(family)
    batch = make_batch([(1, 9), (2, 7), (0, 12)], pad_left)
    backbone = compress(family, name="sparsevlm", keep_ratio=0.6, version=version, heads=2)
    result = backbone.run(batch, pad_left=pad_left)
    for sample in range(3):
        alone = only_sample(batch, sample)
        first = int((batch.regions_BN[sample] == Region.PADDING).sum()) if pad_left else 0
        if not alone.images_per_sample_B.sum():
            assert result.rows.visible_BM[sample].sum() == 14
            continue
        stages, hidden = by_the_release(family, alone, backbone.reducer)
        for (rows, places), (_, _, ours) in zip(stages, result.spans, strict=True):
            seen = ours.visible_BM[sample]
            assert (ours.index_BM[sample, seen] - first).tolist() == rows
            assert ours.position[sample, seen].tolist() == places
        torch.testing.assert_close(
            result.hidden_BMD[sample, result.rows.visible_BM[sample]], hidden, rtol=1e-4, atol=1e-4
        )
    assert result.rows.next_position[:, 0].tolist() == [75, 137, 14]


def test_under_mrope_rows_keep_their_own_positions():
    family = qwen_family()
    result = compress(family, name="sparsevlm", keep_ratio=0.6).run(prompts(family, "three", False))
    whole = result.spans[0][2]
    for _, _, rows in result.spans[1:]:
        assert torch.equal(rows.position, whole.position.gather(-1, rows.index_BM.expand(3, -1, -1)))
        assert torch.equal(rows.next_position, whole.next_position)


def test_without_text_the_last_token_rates_and_a_text_without_a_rater_rates_whole():
    embeds = random_scores(0, 8, 4)[None]
    regions = torch.tensor([[Region.SYSTEM] + [Region.VISUAL] * 7])
    reducer, prompt = build_reducer("sparsevlm", 0.5), torch.ones(1, 8, dtype=torch.bool)
    assert reducer.raters(embeds, regions, prompt)[0].nonzero()[:, 0].tolist() == [7]
    regions[0, 6:] = Region.QUERY
    embeds[0, 7] = embeds[0, 6]
    assert reducer.raters(embeds, regions, prompt)[0].nonzero()[:, 0].tolist() == [6, 7]
    assert not reducer.raters(embeds, regions, ~prompt).any()


def test_gradients_reach_recycled_rows_and_routers_above_the_first_cut(tiny_family):
    backbone = compress(tiny_family, RoutingConfig("linear", 8, 3), name="sparsevlm", keep_ratio=0.6)
    below = []
    backbone.family.decoder.layers[0].register_forward_hook(lambda _, __, out: below.append(out) or out.retain_grad())
    result = backbone.run(make_batch([(1, 9)]))
    backbone.logits(result).square().mean().backward()
    touched = below[0].grad[0].abs().sum(-1) > 0
    stays = torch.isin(torch.arange(75), result.spans[1][2].index_BM[0])
    assert touched[stays].all()
    kept = staged.kept_of(64, int((stays[2:66]).sum()))
    assert int(touched[~stays].sum()) == staged.recycled_counts(64 - kept)[0] - staged.recycled_counts(64 - kept)[1]
    assert [all(p.grad is not None for p in it.parameters()) for it in backbone.bank.selectors] == [False] + [True] * 3
