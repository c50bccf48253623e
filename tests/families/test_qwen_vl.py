"""Qwen's VLMs and GLM's: image sizes, mRoPE ids, deep features, experts between packed layers."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from subtoken_train.types import Region
from tests.support.helpers import compress, unread
from tests.support.plain_parts import prompt_positions
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.tiny import qwen
from tests.support.truth_cells import CELL, difference

FAMILY = qwen.qwen_family()
PICTURES = [Image.effect_noise((160, 100), 60).convert("RGB"), qwen.qwen_video(4)]
GLM = qwen.glm_family()


@pytest.fixture
def family():
    return qwen.qwen_family()


@pytest.fixture
def records(tmp_path):
    return qwen.qwen_records(tmp_path)


@given(height=st.integers(1, 400), width=st.integers(1, 400), cap=st.sampled_from([3136, 20_000, 112_896, 1_003_520]))
def test_counted_tokens_are_what_the_processor_makes(height, width, cap):
    pixels, _ = qwen.made_as_counted(FAMILY, height, width, cap)
    assert pixels.shape[1] == 3 * 2 * 14 * 14


@pytest.mark.parametrize("pad_left", [False, True])
def test_positions_of_several_images_and_text_on_either_side(family, records, pad_left):
    batch = qwen.qwen_batch(family, records, pad_left)
    expected = torch.zeros(3, *batch.input_ids_BN.shape, dtype=torch.long)
    for sample, marks in enumerate(batch.regions_BN != Region.PADDING):
        expected[:, sample, marks] = prompt_positions(family, batch, sample)
    assert torch.equal(family.positions(batch), expected)
    text = qwen.qwen_batch(family, [records[2], records[2]], pad_left)
    assert torch.equal(family.positions(text)[0], torch.arange(text.input_ids_BN.shape[1]).expand(2, -1))


@pytest.mark.parametrize("grid", [None, [[1, 6, 8], [1, 4, 14], [1, 10, 6]], [[1, 6, 8], [1, 10, 6]]])
def test_image_tokens_that_are_not_the_images_are_refused(family, records, grid):
    batch = qwen.qwen_batch(family, records)
    batch.image_grid_I3 = None if grid is None else torch.tensor(grid)
    refuses(r"runs of \[12, 15, 14\] image tokens in the batch of records one, two, text", family.positions, batch)


@torch.no_grad()
def test_nothing_is_kept_between_batches(family, records):
    """Neither our passes nor what a call of the model left behind shifts the next batch."""
    first = qwen.qwen_batch(family, records[:1], generation=True)
    second = qwen.qwen_batch(family, records[1:], pad_left=True)
    fresh = compress(copy.deepcopy(family)).run(second).hidden_BMD
    backbone = compress(family)
    backbone.run(first)
    assert family.model.model.rope_deltas is None
    assert torch.equal(backbone.run(second).hidden_BMD, fresh)
    family.model.model.rope_deltas = torch.tensor([[77], [78]])
    assert torch.equal(backbone.run(second).hidden_BMD, fresh)


def test_images_are_padded_to_squares_where_that_is_asked_for(family):
    """The same pixels and tokens as of an image that was put on the processor's mean by hand."""
    image = Image.effect_noise((90, 40), 60).convert("RGB")
    mean = tuple(round(255 * mean) for mean in family.processor.image_processor.image_mean)
    square = Image.new("RGB", (90, 90), mean)
    square.paste(image, (0, 25))
    pixels, grid = family.process_images([square])
    shape = family.process_images([image])[1]
    video = qwen.qwen_video(2, (40, 90))
    frames = family.frame_size(video)
    family.pad_images()
    assert family.frame_size(video) == frames  # it keeps its shape
    own_pixels, own_grid = family.process_images([image])
    assert torch.equal(own_pixels, pixels)
    assert own_grid.tolist() == grid.tolist() != shape.tolist()
    assert family.visual_tokens((40, 90)) == family.grid_tokens(grid[0].tolist())
    assert np.array_equal(np.asarray(family.framed(image)), np.asarray(square))
    assert family.visual_tokens((1, 2001)) == family.visual_tokens((2001, 2001))  # no side is 200 times the other
    refuses("is larger than 13,377 a side", family.visual_tokens, (1, 60_000))


@pytest.fixture(scope="module")
def deep_family():
    return qwen.qwen3_family()


def batch_with(deep_family, *pictures):
    inputs = inputs_of(deep_family, "first " + "<image> then " * len(pictures) + "where ?", pictures)
    return batch_from_inputs(deep_family, inputs["input_ids"], inputs["attention_mask"].bool(), inputs, None)


def test_deep_features_meet_the_rows_that_are_there_and_count(deep_family):
    """Rows that a reducer drops take theirs along: what stays runs as if by transformers' decoder with these alone."""
    batch = batch_with(deep_family, *PICTURES)
    result = compress(deep_family, name="fastv", keep_ratio=0.25).run(batch)
    kept = result.rows.index_BM[0]
    states = deep_family.visual_states(batch)
    deep_nTD = torch.cat(states.deep, 1)
    visual = deep_family.is_visual(batch.input_ids_BN[0])
    number = visual.cumsum(0) - 1
    shown = visual[kept]
    assert 0 < int(shown.sum()) < int(visual.sum())
    embeds = deep_family.embed(batch, states)[:, kept]
    settings = {"inputs_embeds": embeds, "position_ids": deep_family.positions(batch)[..., kept], "use_cache": False}
    features = [each[number[kept[shown]]] for each in deep_nTD]
    expected = deep_family.decoder(**settings, visual_pos_masks=shown[None], deepstack_visual_embeds=features)
    found = deep_family.decoder.norm(result.hidden_BMD)
    torch.testing.assert_close(found, expected.last_hidden_state, rtol=1e-4, atol=1e-4)
    assert (found - deep_family.decoder(**settings).last_hidden_state).abs().max() > 0.1


def test_merged_tokens_keep_their_targets_deep_features(deep_family):
    batch = batch_with(deep_family, PICTURES[0])
    result = compress(deep_family, name="visionzip", keep_ratio=0.5).run(batch)
    kept = result.rows.index_BM[0]
    states = deep_family.visual_states(batch, "received")
    merged = compress(deep_family, name="visionzip", keep_ratio=0.5).reducer.merge(states, unread(states))
    assert len(merged.tokens[0]) == int(merged.slots[0].sum()) == int((result.rows.regions_BM == Region.VISUAL).sum())
    shown = batch.regions_BN[0, kept] == Region.VISUAL
    assert torch.equal(result.rows.deep_nBMD[:, 0, shown], states.deep[0][:, merged.slots[0]])
    assert not result.rows.deep_nBMD[:, 0, ~shown].any()


@given(height=st.integers(1, 400), width=st.integers(1, 400), cap=st.sampled_from([3136, 20_000, 112_896, 1_003_520]))
@example(height=1, width=2, cap=3136)
def test_counted_tokens_of_glm_are_what_its_processor_makes(height, width, cap):
    _, grid = qwen.made_as_counted(GLM, height, width, cap)
    most = max(cap, 28 * max(height, width) * 28 / min(height, width))
    if round(height / 28) * round(width / 28) * 28**2 < GLM.min_pixels:  # scaled up, perhaps past the cap
        most = max(most, 4 * GLM.min_pixels)
    assert grid.prod() * 14**2 <= most


ROUTED = {**CELL, "scope": "context", "batch": "three_left", "protocol": "query_aware"}
CELLS = {
    "cut": {"reducer": "fastv_decoder", "eviction": "snapkv"},
    "shortened": {"reducer": "fastv_embeds", "eviction": "none", "batch": "last_right"},
    "merged": {"reducer": "visionzip", "eviction": "own_sets", "batch": "text_right"},
    "dropped": {"reducer": "sparsevlm", "selector": "none", "eviction": "kvzip"},
}


@sampled("cell", CELLS, every=3)
@pytest.mark.parametrize("name", ["qwen3_vl_moe", "glm4v_moe"])
def test_experts_between_packed_layers_are_those_of_a_full_recompute(name, cell):
    """In fp32: rounded states can choose other experts."""
    found = difference(ROUTED | CELLS[cell] | {"family": name}, 8)
    assert found.fits("fp32"), found
