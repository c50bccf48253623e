"""Qwen3-VL: its deep features through reducers."""

import pytest
import torch
from PIL import Image

from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from subtoken_train.types import Region
from tests.support.helpers import compress
from tests.support.tiny.qwen import qwen3_family, qwen_video

PICTURES = [Image.effect_noise((160, 100), 60).convert("RGB"), qwen_video(4)]


@pytest.fixture(scope="module")
def family():
    return qwen3_family()


def batch_with(family, *pictures):
    inputs = inputs_of(family, "first " + "<image> then " * len(pictures) + "where ?", pictures)
    return batch_from_inputs(family, inputs["input_ids"], inputs["attention_mask"].bool(), inputs, None)


def test_text_between_the_layers_of_a_video_is_no_visual_row(family):
    batch = batch_with(family, qwen_video(4))
    runs = torch.nn.functional.pad((batch.regions_BN[0] == Region.VISUAL).int(), (1, 1)).diff()
    assert int((runs == 1).sum()) == 2


@torch.no_grad()
def test_deep_features_meet_the_rows_that_are_there_and_count(family):
    """Rows that a reducer drops take theirs along: what stays runs as if by transformers' decoder with these alone."""
    batch = batch_with(family, *PICTURES)
    backbone = compress(family, name="fastv", keep_ratio=0.25)
    result = backbone.run(batch)
    kept = result.rows.index_BM[0]
    states = family.visual_states(batch)
    deep_nTD = torch.cat(states.deep, 1)
    visual = family.is_visual(batch.input_ids_BN[0])
    number = visual.cumsum(0) - 1
    shown = visual[kept]
    assert 0 < int(shown.sum()) < int(visual.sum())
    embeds = family.embed(batch, states)[:, kept]
    positions = family.positions(batch)[..., kept]
    settings = {"inputs_embeds": embeds, "position_ids": positions, "use_cache": False}
    features = [each[number[kept[shown]]] for each in deep_nTD]
    expected = family.decoder(**settings, visual_pos_masks=shown[None], deepstack_visual_embeds=features)
    found = family.decoder.norm(result.hidden_BMD)
    torch.testing.assert_close(found, expected.last_hidden_state, rtol=1e-4, atol=1e-4)
    without = family.decoder(**settings).last_hidden_state
    assert (found - without).abs().max() > 0.1


@torch.no_grad()
def test_merged_tokens_keep_their_targets_deep_features(family):
    batch = batch_with(family, PICTURES[0])
    result = compress(family, name="visionzip", keep_ratio=0.5).run(batch)
    kept = result.rows.index_BM[0]
    states = family.visual_states(batch, "received")
    merged = compress(family, name="visionzip", keep_ratio=0.5).reducer.merge(
        states, [torch.zeros(len(tokens), dtype=torch.bool) for tokens in states.tokens]
    )
    assert len(merged.tokens[0]) == int(merged.slots[0].sum()) == int((result.rows.regions_BM == Region.VISUAL).sum())
    shown = batch.regions_BN[0, kept] == Region.VISUAL
    expected = states.deep[0][:, merged.slots[0]]
    assert torch.equal(result.rows.deep_nBMD[:, 0, shown], expected)
    assert not result.rows.deep_nBMD[:, 0, ~shown].any()
