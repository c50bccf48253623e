"""FasterVLM and VisPruner: an image's own tokens by the tower's attention, and half without doubles."""

import pytest
import torch

from subtoken_train.families import load
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.inference.pool import load_backbone
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region, VisualStates
from tests.support.helpers import compress, make_batch, only_sample, random_scores, unread
from tests.support.plain_choices import without_by_loop
from tests.support.sampling import sampled
from tests.support.tiny.qwen import qwen_family
from tests.support.truth_models import FAMILIES, TEXT, family_of, prompts

SEEING = [name for name in FAMILIES if name not in TEXT]


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


def test_all_important_is_fastervlm(tiny_family):
    states = tiny_family.visual_states(make_batch([(2, 5)]), "class")
    one, other = (
        build_reducer(*each).merge(states, unread(states)).slots for each in (("fastervlm", 0.25), ("vispruner", 0.25))
    )
    whole = build_reducer("vispruner", 0.25, important=1).merge(states, unread(states)).slots
    assert all(map(torch.equal, one, whole))
    assert not all(map(torch.equal, one, other))


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


@sampled("name", SEEING, every=3)
@torch.no_grad()
def test_every_tower_serves_it_and_a_batch_is_its_samples(name):
    family = family_of(name)
    batch = prompts(family, "three", pad_left=True)
    backbone = compress(family, name="vispruner", keep_ratio=0.5)
    result = backbone.run(batch)
    for i in range(3):
        visual = int((batch.regions_BN[i] == Region.VISUAL).sum())
        codes = batch.regions_BN[i, result.rows.index_BM[i, result.rows.visible_BM[i]]]
        assert int((codes == Region.VISUAL).sum()) == backbone.reducer.kept_tokens(visual)
        if not family.in_tiles or batch.image_grid_I3 is not None:  # its tiles are not told apart by the support
            alone = backbone.run(only_sample(batch, i)).hidden_BMD[0]
            torch.testing.assert_close(alone, result.hidden_BMD[i, result.rows.visible_BM[i]], rtol=1e-3, atol=1e-4)


def kept_by_the_paper(attentions_HNN: torch.Tensor, count: int) -> list[int]:
    """Section 3.3 read plainly: the class token's row, the mean over heads, the best patches, in order."""
    row = [float(value) for value in attentions_HNN.mean(0)[0].detach()][1:]
    return sorted(sorted(range(len(row)), key=lambda place: (-row[place], place))[:count])


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
        places = kept_by_the_paper(outputs.attentions[layer][image], kept)
        assert merged.slots[image].nonzero()[:, 0].tolist() == places
        assert torch.equal(merged.tokens[image], states.tokens[image][places])
        torch.testing.assert_close(states.tokens[image], outputs.hidden_states[layer][image, 1:])


@torch.no_grad()
def test_the_language_model_sees_what_plain_transformers_would(tiny_family):
    batch = make_batch([(1, 9)])
    backbone = compress(tiny_family, name="fastervlm", keep_ratio=0.25)
    states = tiny_family.visual_states(batch, "class")
    places = states.received[0].topk(16).indices.sort().values
    words = tiny_family.model.get_input_embeddings()(batch.input_ids_BN)
    shown = tiny_family.project(states.tokens[0][places])[None]
    embeds = torch.cat([words[:, :2], shown, words[:, 66:]], dim=1)
    expected = tiny_family.model.lm_head(tiny_family.decoder(inputs_embeds=embeds).last_hidden_state)
    torch.testing.assert_close(backbone.logits(backbone.run(batch)), expected, rtol=1e-5, atol=1e-5)
    assert backbone.run(batch).rows.index_BM[0, 2:18].tolist() == (2 + places).tolist()
    assert not backbone.placeless


def test_a_tower_without_a_class_token_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    qwen_family().model.config.save_pretrained(tmp_path)
    monkeypatch.setattr(load, "load_weights", lambda *_: pytest.fail("weights were read"))
    words = r"'fastervlm' ranks by a class token's attention, .* qwen2_5_vl does not give; use visionzip or fastv"
    with pytest.raises(ValueError, match=words):
        load_backbone(tmp_path, backbone=BackboneConfig(), reducer=build_reducer("fastervlm", 0.5))
