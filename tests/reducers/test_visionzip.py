"""VisionZip on LLaVA: what the tower reads, which rows stay, and what the language model sees of them."""

import pytest
import torch

from subtoken_train.families.towers import class_attention
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.visionzip import contextual_targets, contextual_tokens, dominant_tokens
from subtoken_train.types import Region, VisualStates
from tests.support.generation_cells import generate_greedy
from tests.support.helpers import check_alone, compress, make_batch, unread

MIXED = [(1, 9), (2, 7), (0, 12)]


def test_class_attention_is_that_of_the_eager_tower(tiny_family):
    pixels = make_batch([(2, 5)]).pixel_values
    tower = tiny_family.model.model.vision_tower
    tower.set_attn_implementation("eager")
    outputs = tower(pixels, output_hidden_states=True, output_attentions=True)
    layer = tower.encoder.layers[2]
    received, keys = class_attention(layer.self_attn, layer.layer_norm1(outputs.hidden_states[2]))
    torch.testing.assert_close(received, outputs.attentions[2][:, :, 0, 1:].sum(1))
    raw = layer.self_attn.k_proj(layer.layer_norm1(outputs.hidden_states[2])).unflatten(-1, (4, 32))
    torch.testing.assert_close(keys, raw[:, 1:].mean(2))


def test_statistics_come_from_the_layer_that_made_the_features(tiny_family):
    batch = make_batch([(1, 5)])
    tower = tiny_family.model.model.vision_tower
    for feature_layer in (-1, -2, [1, -2]):
        tiny_family.model.config.vision_feature_layer = feature_layer
        states = tiny_family.visual_states(batch, "received")
        made_by = {-1: 3, -2: 2}[feature_layer if isinstance(feature_layer, int) else feature_layer[-1]]
        hidden = tower(batch.pixel_values, output_hidden_states=True).hidden_states
        layer = tower.encoder.layers[made_by]
        received, keys = class_attention(layer.self_attn, layer.layer_norm1(hidden[made_by]))
        assert torch.equal(states.received[0], received[0])
        assert torch.equal(states.keys[0], keys[0])
        assert torch.equal(states.cls[0][-128:], hidden[made_by + 1][0, 0])


def test_a_tower_without_a_class_token_is_refused(tiny_family):
    tiny_family.model.config.vision_feature_select_strategy = "full"
    with pytest.raises(ValueError, match="a reducer in the tower needs a CLIP tower"):
        tiny_family.visual_states(make_batch([(1, 5)], visual=65), "received")


@pytest.mark.parametrize(("ratio", "kept", "contextual"), [(0.25, 16, 2), (0.125, 8, 1), (0.015625, 1, 0)])
def test_kept_count_is_split_into_class_dominant_and_contextual(tiny_family, ratio, kept, contextual):
    batch = make_batch([(1, 9)])
    states = tiny_family.visual_states(batch, "received")
    merged = build_reducer(name="visionzip", keep_ratio=ratio).merge(states, unread(states))
    dominant = dominant_tokens(states.received[0], kept - contextual - 1)
    rest = torch.ones(64, dtype=torch.bool)
    rest[dominant] = False
    targets = contextual_targets(int(rest.sum()), contextual)
    expected = [states.cls[0][None], states.tokens[0][dominant]]
    expected.append(contextual_tokens(states.tokens[0][rest], states.keys[0][rest], targets))
    assert torch.equal(merged.tokens[0], torch.cat(expected))
    assert merged.tokens[0].shape == (kept, 128)
    assert merged.slots[0].nonzero()[:, 0].tolist() == list(range(kept))


def test_without_a_class_token_rows_stay_in_raster_order_at_their_own_places():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(64, 6, generator=generator)
    keys, received = torch.randn(64, 4, generator=generator), torch.randn(64, generator=generator)
    states = VisualStates([tokens], None, [received], [keys])
    merged = build_reducer(name="visionzip", keep_ratio=0.25).merge(states, unread(states))
    dominant = set(dominant_tokens(received, 14).tolist())
    kept = merged.slots[0].nonzero()[:, 0].tolist()
    assert len(kept) == 16
    assert dominant < set(kept)
    unchanged = [torch.equal(merged.tokens[0][row], tokens[place]) for row, place in enumerate(kept)]
    assert unchanged == [place in dominant for place in kept]


@pytest.mark.parametrize("name", ["visionzip", "fastervlm"])
@pytest.mark.parametrize("pad_left", [False, True])
@torch.no_grad()
def test_a_batch_equals_its_samples_and_positions_count_anew(tiny_family, pad_left, name):
    backbone = compress(tiny_family, name=name, keep_ratio=0.25)
    together = check_alone(backbone, make_batch(MIXED, pad_left), pad_left)
    assert together.rows.regions_BM.eq(Region.VISUAL).sum(-1).tolist() == [16, 32, 0]


@torch.no_grad()
def test_the_language_model_sees_what_plain_transformers_would(tiny_family):
    batch = make_batch([(1, 9)])
    backbone = compress(tiny_family, name="visionzip", keep_ratio=0.25)
    states = tiny_family.visual_states(batch, "received")
    merged = backbone.reducer.merge(states, unread(states))
    words = tiny_family.model.get_input_embeddings()(batch.input_ids_BN)
    embeds = torch.cat([words[:, :2], tiny_family.project(merged.tokens[0])[None], words[:, 66:]], dim=1)
    expected = tiny_family.model.lm_head(tiny_family.decoder(inputs_embeds=embeds).last_hidden_state)
    torch.testing.assert_close(backbone.logits(backbone.run(batch)), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_decoding_continues_at_the_renumbered_length(tiny_family):
    batch = make_batch([(1, 9), (0, 12)], pad_left=True)
    backbone = compress(tiny_family, name="visionzip", keep_ratio=0.25)
    generated = generate_greedy(backbone, batch, 4).token_ids_BT
    prompt = backbone.run(batch, pad_left=True)
    assert prompt.rows.next_position[:, 0].tolist() == [27, 14]
    hidden = backbone.family.embed(batch)
    for sample, length in ((0, 27), (1, 14)):
        ids = batch.input_ids_BN[sample]
        if sample == 0:
            states = tiny_family.visual_states(batch, "received")
            merged = backbone.reducer.merge(states, unread(states))
            rows = torch.cat([hidden[0, :2], tiny_family.project(merged.tokens[0]), hidden[0, 66:]])
        else:
            rows = hidden[1, len(ids) - length :]
        for step in range(4):
            state = tiny_family.decoder(inputs_embeds=rows[None]).last_hidden_state[:, -1]
            token = tiny_family.model.lm_head(state).argmax(-1)
            assert token.item() == generated[sample, step].item()
            if token.item() == tiny_family.tokenizer.eos_token_id:
                break
            rows = torch.cat([rows, tiny_family.model.get_input_embeddings()(token)])


def test_a_missing_image_is_named_with_its_records(tiny_family):
    batch = make_batch([(2, 7)])
    batch.pixel_values = batch.pixel_values[:1]
    with pytest.raises(ValueError, match="128 image tokens but 64 visual features in the batch of records sample-0"):
        compress(tiny_family, name="visionzip", keep_ratio=0.25).run(batch)
