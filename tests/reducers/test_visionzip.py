"""VisionZip: what the tower reads, which rows stay, what the language model sees; pictures in tiles, each by itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.families.tiles import TileLayout
from subtoken_train.families.towers import class_attention
from subtoken_train.ledger.kv_budget import kept_count
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.tower import contextual_tokens, dominant_tokens, tile_shares, zipped_tiles
from subtoken_train.types import Region, VisualStates
from tests.support.helpers import check_alone, compress, make_batch, unread
from tests.support.sampling import sampled
from tests.support.tiny.llava import TOKENS, next_batch, next_family, next_records

LAYOUT = TileLayout(((24, 48), (48, 24), (48, 48), (72, 24), (24, 72)), 24, 3)


def test_class_attention_is_that_of_the_eager_tower(tiny_family):
    tower = tiny_family.model.model.vision_tower
    tower.set_attn_implementation("eager")
    outputs = tower(make_batch([(2, 5)]).pixel_values, output_hidden_states=True, output_attentions=True)
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
    with pytest.raises(ValueError, match="a tower's reducer needs a layer past the embeddings"):
        tiny_family.visual_states(make_batch([(1, 5)], visual=65), "received")


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


@pytest.mark.parametrize("name", ["visionzip", "fastervlm", "prunesid"])
@pytest.mark.parametrize("pad_left", [False, True])
def test_a_batch_equals_its_samples_and_positions_count_anew(tiny_family, pad_left, name):
    backbone = compress(tiny_family, name=name, keep_ratio=0.25)
    together = check_alone(backbone, make_batch([(1, 9), (2, 7), (0, 12)], pad_left), pad_left)
    assert together.rows.regions_BM.eq(Region.VISUAL).sum(-1).tolist() == [16, 32, 0]
    assert together.rows.next_position[:, 0].tolist() == together.rows.visible_BM.sum(-1).tolist()


@pytest.mark.parametrize(("name", "read"), [("visionzip", "received"), ("fastervlm", "class")])
def test_the_language_model_sees_what_plain_transformers_would(tiny_family, name, read):
    batch = make_batch([(1, 9)])
    backbone = compress(tiny_family, name=name, keep_ratio=0.25)
    states = tiny_family.visual_states(batch, read)
    merged = backbone.reducer.merge(states, unread(states))
    words = tiny_family.model.get_input_embeddings()(batch.input_ids_BN)
    embeds = torch.cat([words[:, :2], tiny_family.project(merged.tokens[0])[None], words[:, 66:]], dim=1)
    expected = tiny_family.model.lm_head(tiny_family.decoder(inputs_embeds=embeds).last_hidden_state)
    result = backbone.run(batch)
    torch.testing.assert_close(backbone.logits(result), expected, rtol=1e-5, atol=1e-5)
    assert backbone.placeless == (name == "visionzip")
    if name == "fastervlm":
        places = states.received[0].topk(16).indices.sort().values
        assert result.rows.index_BM[0, 2:18].tolist() == (2 + places).tolist()
        assert torch.equal(merged.tokens[0], states.tokens[0][places])


def states_of(size: tuple[int, int], seed: int = 0) -> VisualStates:
    """A random picture; its last channel marks newlines."""
    generator = torch.Generator().manual_seed(seed)
    tiles = LAYOUT.tiles(size)

    def packed(values_IPC, end):
        return LAYOUT.pack(values_IPC, size, torch.tensor(end))

    tokens = packed(torch.randn(tiles, 9, 5, generator=generator) * torch.tensor([1.0, 1, 1, 1, 0]), [0.0, 0, 0, 0, 1])
    received = packed(torch.rand(tiles, 9, 1, generator=generator), [0.0])[:, 0]
    keys = packed(torch.randn(tiles, 9, 4, generator=generator), [0.0] * 4)
    numbers = packed(torch.arange(tiles).float()[:, None, None].expand(-1, 9, 1), [-1.0])[:, 0].long()
    cls = torch.randn(tiles, 5, generator=generator) * torch.tensor([1.0, 1, 1, 1, 0])
    return VisualStates([tokens], [cls], [received], [keys], tiles=[numbers])


@given(patches=st.lists(st.integers(0, 600), min_size=1, max_size=6).filter(any), share=st.floats(0, 1))
def test_shares_are_exact_and_fit_their_tiles(patches, share):
    kept = round(share * sum(patches))
    shares = tile_shares(patches, kept)
    assert sum(shares) == kept
    assert all(0 <= own <= count for own, count in zip(shares, patches, strict=True))
    exact = [kept * count / sum(patches) for count in patches]
    assert all(abs(own - fair) < 1 for own, fair in zip(shares, exact, strict=True))


@sampled("name, round_up", [("visionzip", False), ("prunesid", False), ("visionzip", True)], every=2)
@given(high=st.integers(1, 90), wide=st.integers(1, 90), ratio=st.floats(0.01, 0.999))
def test_the_budget_counts_every_placeholder(name, round_up, high, wide, ratio):
    states = states_of((high, wide))
    merged = build_reducer(name=name, keep_ratio=ratio, round_up=round_up).merge(states, unread(states))
    kept = kept_count(LAYOUT.placeholders((high, wide)), ratio, round_up)
    assert merged.tokens[0].shape == (kept, 5)
    assert merged.slots[0].nonzero()[:, 0].tolist() == list(range(kept))
    newlines = max(0, kept - int((states.tiles[0] >= 0).sum()))
    assert merged.tokens[0][:, -1].tolist() == [0] * (kept - newlines) + [1] * newlines


def plain(states: VisualStates, kept: int) -> torch.Tensor:
    """Tile by tile as on LLaVA-1.5, then the release's order."""
    tokens, received, keys, tiles = (part[0] for part in (states.tokens, states.received, states.keys, states.tiles))
    dominant_rows, classes, contextual = [], [], []
    first = None
    for tile, share in enumerate(tile_shares([int((tiles == tile).sum()) for tile in range(len(states.cls[0]))], kept)):
        if not share:
            continue
        own = [place for place in range(len(tiles)) if tiles[place] == tile]
        merging = share * 10 // 64
        best = sorted(own, key=lambda place: (-float(received[place]), place))[: share - merging - 1]
        rest = [place for place in own if place not in best]
        step = max(1, len(rest) // max(1, merging))
        targets = torch.tensor([index for index in range(len(rest)) if index % step == 0][:merging], dtype=torch.long)
        made = contextual_tokens(tokens[rest], keys[rest], targets)
        if tile == 0:
            first = torch.cat([states.cls[0][:1], tokens[sorted(best)], made])
        else:
            dominant_rows += best
            classes.append(states.cls[0][tile])
            contextual.append(made)
    after = [tokens[sorted(dominant_rows)], torch.stack(classes), torch.cat(contextual)] if classes else []
    return torch.cat([first, *after])


@pytest.mark.parametrize("size", [(30, 50), (61, 17), (24, 71), (47, 49), (3, 80)])
@pytest.mark.parametrize("kept", [1, 4, 15, 24, 30])
def test_each_tile_is_zipped_by_itself_in_the_releases_order(size, kept):
    states = states_of(size, seed=sum(size))
    kept = min(kept, int((states.tiles[0] >= 0).sum()))
    given_parts = (states.tokens[0], states.received[0], states.keys[0], states.cls[0], states.tiles[0])
    assert torch.equal(zipped_tiles(*given_parts, kept, build_reducer("visionzip", 0.5).choose), plain(states, kept))


@pytest.mark.parametrize("name", ["visionzip", "prunesid", "fastervlm", "prumerge"])
def test_a_batch_equals_its_samples(tmp_path, name):
    family = next_family()
    batch = next_batch(family, next_records(tmp_path))
    together = check_alone(compress(family, name=name, keep_ratio=0.25), batch, pad_left=False)
    assert together.rows.regions_BM.eq(Region.VISUAL).sum(-1).tolist() == [TOKENS[0] // 4, sum(TOKENS[1:]) // 4, 0]
