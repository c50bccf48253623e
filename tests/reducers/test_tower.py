"""FasterVLM, VisPruner, PruneSID, PruMerge: attention, doubles, components, merging; the release's golden, loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from subtoken_train.cli.main import main
from subtoken_train.families import load
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.towers import class_attention
from subtoken_train.inference.pool import load_backbone
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers import tower as rules
from subtoken_train.types import Region, VisualStates
from tests.support import truth_cells
from tests.support.golden_cases import near
from tests.support.helpers import check_alone, compress, make_batch, only_sample, random_scores, unread
from tests.support.places import recipe
from tests.support.plain_choices import by_components, without_by_loop
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.tiny.qwen import qwen_family
from tests.support.truth_cells import difference
from tests.support.truth_models import FAMILIES, TEXT, family_of, prompts


def by_loops(tokens, received, count, important):
    """The method read plainly, one image: places that stay."""
    order = sorted(range(len(received)), key=lambda place: (-float(received[place]), place))
    best, others = order[:important], order[important:]
    distinct = without_by_loop(tokens[others], count - important) if count > important else []
    return sorted([*best, *(others[place] for place in distinct)])


def states_of(tokens, seed=0, **more):
    return VisualStates([random_scores(seed, tokens, 6)], None, [random_scores(seed + 1, 1, tokens)[0]], **more)


def kept(reducer, states, read=None):
    return reducer.merge(states, unread(states) if read is None else [read]).slots[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize("tokens", [1, 2, 13, 40])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99])
@pytest.mark.parametrize("important", [0, 0.5, 1])
def test_what_stays_is_what_the_loops_keep(tokens, share, important):
    states, reducer = states_of(tokens), build_reducer("vispruner", share, important=important)
    count = reducer.kept_tokens(tokens)
    expected = by_loops(states.tokens[0], states.received[0], count, int(count * important))
    merged = reducer.merge(states, unread(states))
    assert merged.slots[0].nonzero()[:, 0].tolist() == expected
    assert len(expected) == count
    assert torch.equal(merged.tokens[0], states.tokens[0][expected])


def test_a_row_that_is_read_is_among_the_important_and_newlines_go_first():
    states = states_of(9)
    states.received[0][8] = -5
    assert 8 not in kept(build_reducer("vispruner", 0.34, important=1), states)
    read = torch.arange(9) == 8
    assert 8 in kept(build_reducer("vispruner", 0.34, important=1), states, read)
    assert kept(build_reducer("vispruner", 0.01), states, read) == [8]
    states.tiles = [torch.tensor([0, 0, -1, 0, 0, -1, 0, 0, -1])]
    assert not {2, 5, 8} & {*kept(build_reducer("vispruner", 0.67), states)}
    assert kept(build_reducer("vispruner", 0.8), states) == [0, 1, 2, 3, 4, 6, 7]
    assert 8 in kept(build_reducer("vispruner", 0.34), states, read)


def test_alike_tokens_go_in_the_order_of_their_index_and_bf16_is_compared_in_fp32():
    states = VisualStates([torch.ones(8, 4, dtype=torch.bfloat16)], None, [torch.zeros(8)])
    assert kept(build_reducer("vispruner", 0.5), states) == by_loops(torch.ones(8, 4), torch.zeros(8), 4, 2)
    rows = torch.ones(20, 64, dtype=torch.bfloat16) + random_scores(0, 20, 64, dtype=torch.bfloat16)
    states = VisualStates([rows], None, [random_scores(1, 1, 20)[0]])
    assert kept(build_reducer("vispruner", 0.5), states) == by_loops(rows.float(), states.received[0], 10, 5)


@sampled("name", [name for name in FAMILIES if name not in TEXT], every=3)
@pytest.mark.parametrize("reducer", ["vispruner", "prunesid"])
def test_every_tower_serves_it_and_a_batch_is_its_samples(name, reducer):
    family = family_of(name)
    batch = prompts(family, "three", pad_left=True)
    backbone = compress(family, name=reducer, keep_ratio=0.5)
    result = backbone.run(batch)
    for i in range(3):
        visual = int((batch.regions_BN[i] == Region.VISUAL).sum())
        codes = batch.regions_BN[i, result.rows.index_BM[i, result.rows.visible_BM[i]]]
        assert int((codes == Region.VISUAL).sum()) == backbone.reducer.kept_tokens(visual)
        if not family.in_tiles or batch.image_grid_I3 is not None:  # its tiles are not told apart by the support
            alone = backbone.run(only_sample(batch, i)).hidden_BMD[0]
            torch.testing.assert_close(alone, result.hidden_BMD[i, result.rows.visible_BM[i]], rtol=1e-3, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 40), part=st.floats(0, 1), classes=st.integers(0, 1), seed=st.integers(0, 10_000),
    levels=st.sampled_from([None, 3]),
)  # fmt: skip
def test_prunesid_takes_of_every_component_what_the_loops_take(tokens, part, classes, seed, levels):
    """As many as asked for, each once; ties of the attention go to the lower index."""
    rows, received = random_scores(seed, tokens, 12) + 0.5, random_scores(seed + 1, 1, tokens, levels=levels)[0]
    kept = max(1, round(part * tokens))
    found = rules.principal_tokens(rows, received, kept, classes).tolist()
    assert len(set(found)) == len(found) == kept - classes
    assert found == by_components(rows, received, kept, classes)


def test_alike_tokens_are_one_component_what_is_no_number_goes_last_and_a_read_row_first():
    alike, received = torch.ones(9, 12, dtype=torch.bfloat16), random_scores(3, 1, 9)[0]
    order = received.argsort(descending=True, stable=True).tolist()
    assert rules.principal_tokens(alike, received, 5, 0).tolist() == order[:5]
    rows = random_scores(0, 20, 12, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        halves = rules.principal_tokens(rows, random_scores(1, 1, 20)[0], 8, 0).tolist()
    assert halves == by_components(rows.float(), random_scores(1, 1, 20)[0], 8, 0)
    rows[4] = torch.nan
    assert len(rules.principal_tokens(rows, random_scores(1, 1, 20)[0], 8, 0)) == 8
    states, reducer = states_of(9, keys=[random_scores(5, 9, 3)]), build_reducer("prunesid", 0.34)
    for place in range(9):
        read = torch.arange(9) == place
        assert place in kept(reducer, states, read)
        assert kept(build_reducer("prunesid", 0.01), states, read) == [place]
    states.tiles = [torch.tensor([0, 0, -1, 0, 0, -1, 0, 0, -1])]
    assert not {2, 5, 8} & {*kept(build_reducer("prunesid", 0.67), states)}
    assert kept(build_reducer("prunesid", 0.8), states) == [0, 1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize(("ratio", "kept"), [(0.25, 16), (0.15625, 10), (0.001, 1)])
def test_the_best_patches_of_the_eager_tower_stay_in_order(tiny_family, ratio, kept):
    batch = make_batch([(2, 5)])
    states = tiny_family.visual_states(batch, "class")
    merged = build_reducer("fastervlm", ratio).merge(states, unread(states))
    tower = tiny_family.model.model.vision_tower
    tower.set_attn_implementation("eager")
    outputs = tower(batch.pixel_values, output_hidden_states=True, output_attentions=True)
    layer = tiny_family.model.config.vision_feature_layer  # -2: what it made, and the attention of the layer that did
    for image in range(2):
        # section 3.3 read plainly: the class token's row, the mean over heads, the best patches, in order
        row = [float(value) for value in outputs.attentions[layer][image].mean(0)[0].detach()][1:]
        places = sorted(sorted(range(len(row)), key=lambda place: (-row[place], place))[:kept])
        assert merged.slots[image].nonzero()[:, 0].tolist() == places
        assert torch.equal(merged.tokens[image], states.tokens[image][places])
        torch.testing.assert_close(states.tokens[image], outputs.hidden_states[layer][image, 1:])


def test_a_tower_without_a_class_token_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    qwen_family().model.config.save_pretrained(tmp_path)
    monkeypatch.setattr(load, "load_weights", lambda *_: pytest.fail("weights were read"))
    words = r"'fastervlm' ranks by a class token's attention, .* qwen2_5_vl does not give; use visionzip or fastv"
    refuses(words, load_backbone, tmp_path, backbone=BackboneConfig(), reducer=build_reducer("fastervlm", 0.5))


MIXED = [(1, 9), (2, 7), (0, 12)]
KINDS = [{"plus": plus, "adaptive": adaptive} for plus in (False, True) for adaptive in (False, True)]


def image_of(tokens: int, seed: int = 0, peaks: int = 0) -> VisualStates:
    """One image of random tokens, ``peaks`` of them far above the others."""
    received = random_scores(seed, 1, tokens)[0].softmax(0)
    received[torch.arange(peaks) * 3 % tokens] += 1 + torch.arange(peaks)
    keys, states = random_scores(seed + 1, tokens, 5), random_scores(seed + 2, tokens, 7)
    return VisualStates([states], [states[0]], [received], [keys])


def by_loop(states: VisualStates, chosen: list[int]) -> torch.Tensor:
    """The release's inner loops, one token and one neighbour at a time."""
    tokens, received, keys = states.tokens[0], states.received[0], states.keys[0]
    out = []
    for place in chosen:
        like = {o: float(torch.cosine_similarity(keys[place], keys[o], dim=0)) for o in range(len(keys)) if o != place}
        near = sorted(like, key=lambda o: -like[o])[:32]
        out.append(tokens[place] + sum((received[o] * tokens[o] for o in near), torch.zeros(tokens.shape[1])))
    dropped = [place for place in range(len(tokens)) if place not in chosen]
    return torch.stack([*out, sum((received[o] * tokens[o] for o in dropped), torch.zeros(tokens.shape[1]))])


def plus_by_loop(received: torch.Tensor, ratio: float) -> list[int]:
    """The release's ``advanced_plus`` with ``if_adaptive``, its 575 being the tokens less one."""
    order = sorted(range(len(received)), key=lambda place: (-float(received[place]), place))
    best = order[: int(len(received) * ratio)]
    return best + [place for place in range(0, len(received) - 1, int(int(1 / ratio) / 3)) if place not in best]


@pytest.fixture
def golden(shared):
    """The release's inputs and outputs, and its statistics computed from them."""
    tensors = load_file(shared / "golden" / "prumerge" / "set_a.safetensors")
    query, key = tensors["q_last"], tensors["k_last"]
    attention = (query[:, :1] @ key.mT * query.shape[-1] ** -0.5).softmax(-1)[:, 0, 1:]
    images = zip(tensors["hidden_m2"][:, 1:], attention, key[:, 1:], strict=True)
    return tensors, [VisualStates([tokens], None, [received], [keys]) for tokens, received, keys in images]


def test_golden_attention_and_share_of_outliers(golden):
    tensors, images = golden
    for states, expected in zip(images, tensors["cls_attention"], strict=True):
        near("prumerge", "prumerge: attention", states.received[0], expected)
    found = sum(rules.outliers(each.received[0]) for each in images) / sum(len(each.received[0]) for each in images)
    assert found == pytest.approx(float(tensors["outlier_ratio"]))


@pytest.mark.parametrize("adaptive", [True, False])
def test_golden_tokens(golden, adaptive):
    """The release's fixed mode keeps int(N / 8) and the extra token."""
    tensors, images = golden
    for states, out in zip(images, tensors["tokens_out_adaptive" if adaptive else "tokens_out_fixed_1_8"], strict=True):
        ratio = 1.0 if adaptive else (int(len(states.tokens[0]) / 8) + 1.5) / len(states.tokens[0])
        ours = build_reducer("prumerge", ratio, adaptive=adaptive).merge(states, unread(states)).tokens[0]
        near("prumerge", f"prumerge: tokens {'adaptive' if adaptive else 'fixed'}", ours, out, atol=1e-5)


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_merging_equals_a_plain_loop(tokens, count, seed):
    states = image_of(tokens, seed)
    chosen = rules.chosen_tokens(states.received[0], min(count, tokens), None)
    merged = rules.merged_tokens(states.tokens[0], states.received[0], states.keys[0], chosen)
    torch.testing.assert_close(merged, by_loop(states, chosen.tolist()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [64, 100, 576])
@pytest.mark.parametrize("peaks", [1, 3, 7, 14])
def test_plus_adds_the_releases_spread_tokens(tokens, peaks):
    states = image_of(tokens, peaks=peaks)
    share = rules.outliers(states.received[0]) / tokens
    chosen = plus_by_loop(states.received[0], share)
    assert rules.chosen_tokens(states.received[0], int(tokens * share), rules.spread_step(share)).tolist() == chosen
    merged = build_reducer("prumerge", 1.0, plus=True, adaptive=True).merge(states, unread(states)).tokens[0]
    assert len(merged) == len(chosen) + 1
    if tokens < 100:
        torch.testing.assert_close(merged, by_loop(states, chosen), rtol=1e-4, atol=1e-5)


@given(st.integers(1, 200), st.floats(0, 1), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_plus_at_a_fixed_count_is_exact_and_takes_the_most_outliers_that_fit(tokens, part, seed):
    received, count = random_scores(seed, 1, tokens, levels=7)[0], int(part * tokens)
    chosen = rules.chosen_count(received, count).tolist()
    assert len(chosen) == len(set(chosen)) == count
    fitting = [
        released
        for best in range(1, count + 1)
        if len(released := rules.chosen_tokens(received, best, rules.spread_step(best / tokens)).tolist()) <= count
    ]
    start = fitting[-1] if fitting else []
    order = rules.chosen_tokens(received, tokens, None).tolist()
    assert chosen == start + [place for place in order if place not in start][: count - len(start)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("ratio", [0.25, 0.125, 0.015625])
def test_the_kept_count_holds_the_extra_token_and_is_a_cap_where_images_choose(tiny_family, kind, ratio):
    states = tiny_family.visual_states(make_batch([(2, 9)]), "unsplit")
    reducer = build_reducer("prumerge", ratio, **kind)
    merged = reducer.merge(states, unread(states))
    for image, tokens in enumerate(merged.tokens):
        assert merged.slots[image].nonzero()[:, 0].tolist() == list(range(len(tokens)))
        most = reducer.kept_tokens(64)
        assert len(tokens) == most if reducer.fixed_count else 1 <= len(tokens) <= most


def test_an_image_without_outliers_keeps_the_extra_token_alone():
    states = VisualStates([torch.eye(40)], None, [torch.full((40,), 0.025)], [torch.eye(40)])
    merged = build_reducer("prumerge", 1.0, adaptive=True).merge(states, unread(states))
    torch.testing.assert_close(merged.tokens[0], torch.full((1, 40), 0.025))
    spread = build_reducer("prumerge", 1.0, adaptive=True, plus=True).merge(states, unread(states))
    assert len(spread.tokens[0]) == len({0, 13, 26}) + 1


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("plus", [False, True])
def test_nothing_is_merged_into_newlines(plus, ratio):
    """Newlines of a picture in tiles hold a mark alone, which what merged into them would lose."""
    generator = torch.Generator().manual_seed(0)
    tiles = torch.tensor(([0] * 3 + [-1]) * 12)
    patch = tiles >= 0
    tokens, keys = (torch.randn(48, 6, generator=generator) * patch[:, None] for _ in range(2))
    tokens = torch.cat([tokens, (~patch)[:, None].float()], 1)
    received = torch.rand(48, generator=generator) * patch
    states = VisualStates([tokens], None, [received], [keys], tiles=[tiles])
    reducer = build_reducer("prumerge", ratio, plus=plus)
    merged = reducer.merge(states, [torch.zeros(48, dtype=torch.bool)])
    count = min(reducer.kept_tokens(48), 48)
    assert len(merged.tokens[0]) == int(merged.slots[0].sum()) == count
    whole = count - 1 > int(patch.sum())
    assert bool(merged.tokens[0][:, -1].any()) == whole
    if not whole:
        alone = VisualStates([tokens[patch]], None, [received[patch]], [keys[patch]])
        chosen = reducer._chosen(received[patch], count - 1)
        assert torch.equal(merged.tokens[0], rules.merged_tokens(alone.tokens[0], received[patch], keys[patch], chosen))


@pytest.mark.parametrize("feature_layer", [-1, -2])
def test_statistics_are_the_last_layers_with_heads_unsplit(tiny_family, feature_layer):
    tiny_family.model.config.vision_feature_layer = feature_layer
    batch, tower = make_batch([(1, 5)]), tiny_family.model.model.vision_tower
    states = tiny_family.visual_states(batch, "unsplit")
    hidden, last = tower(batch.pixel_values, output_hidden_states=True).hidden_states, tower.encoder.layers[-1]
    normed = last.layer_norm1(hidden[-2])
    query, key = last.self_attn.q_proj(normed), last.self_attn.k_proj(normed)
    torch.testing.assert_close(states.received[0], (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)[0, 0, 1:])
    torch.testing.assert_close(states.keys[0], key[0, 1:])
    assert torch.equal(states.tokens[0], hidden[feature_layer][0, 1:])
    assert not torch.allclose(states.received[0], class_attention(last.self_attn, normed)[0][0], rtol=1e-3)


@sampled("kind", KINDS, every=4, ids=str)
@pytest.mark.parametrize("pad_left", [False, True])
def test_a_batch_equals_its_samples_and_positions_count_anew(tiny_family, kind, pad_left):
    """In the release the images of a batch share one count."""
    backbone = compress(tiny_family, name="prumerge", keep_ratio=0.25, **kind)
    together = check_alone(backbone, make_batch(MIXED, pad_left), pad_left)
    if not kind["adaptive"]:
        assert together.rows.regions_BM.eq(Region.VISUAL).sum(-1).tolist() == [16, 32, 0]


def test_keep_ratio_one_does_not_bypass_it_where_images_choose(tiny_family):
    batch = make_batch(MIXED)
    whole = compress(tiny_family).run(batch)
    chosen = compress(tiny_family, name="prumerge", adaptive=True).run(batch)
    assert chosen.hidden_BMD.shape[1] < whole.hidden_BMD.shape[1]
    assert compress(tiny_family, name="prumerge", adaptive=True).placeless


CELL = truth_cells.PLAIN_CELL | {
    "reducer": "prumerge",
    "selector": "linear",
    "eviction": "none",
    "protocol": "query_aware",
}


@pytest.mark.parametrize(("family", "batch"), [("llava", "three_left"), ("llava_gqa", "last_right")])
def test_packed_is_truth_where_images_keep_different_counts(monkeypatch, family, batch):
    adaptive = {"name": "prumerge", "plus": True, "adaptive": True, "keep_ratio": 1.0}
    monkeypatch.setitem(truth_cells.REDUCERS, "prumerge", adaptive)
    found = difference(CELL | {"family": family, "batch": batch}, 4)
    assert found.fits("fp32"), found


def test_an_arm_whose_images_choose_has_no_solved_anchor(capsys):
    argv = ["--model.reducer.name=prumerge", "--model.reducer.adaptive=true"]
    assert main(["check", "--config", str(recipe("tiny_visionzip25_s16k4")), "--offline", *argv]) == 0
    out = capsys.readouterr().out
    assert "prumerge, keeps 0.25 (at most 16 of 64), plus=False, adaptive=True" in out
    assert "matched anchor: none, images keep different numbers of tokens; these bytes are the maximum" in out
