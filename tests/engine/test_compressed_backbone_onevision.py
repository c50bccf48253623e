"""Reducers on LLaVA-OneVision: newlines, videos, and generation like transformers."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.families.images import Video
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from subtoken_train.reducers.visionzip import zipped
from subtoken_train.types import Region
from tests.support.helpers import ALL_GROUPS, compress
from tests.support.tiny.llava_onevision import FRAME, noise, onevision_family, onevision_records
from tests.support.tiny.qwen import qwen_batch


@pytest.fixture
def family():
    return onevision_family()


@pytest.fixture
def records(tmp_path):
    return onevision_records(tmp_path)


@pytest.mark.parametrize(("ratio", "newlines"), [(0.25, 0), (0.9, 0), (0.95, 3)])
@torch.no_grad()
def test_visionzip_leaves_newlines_out_until_all_patches_stay(family, records, ratio, newlines):
    """Of 51 tokens six are newlines; without them the rest is what a picture of 45 patches would give."""
    batch = qwen_batch(family, records[:1])
    states = family.visual_states(batch, "received")
    reducer = compress(family, name="visionzip", keep_ratio=ratio).reducer
    merged = reducer.merge(states, [torch.zeros(51, dtype=torch.bool)])
    is_newline = states.tiles[0] < 0
    assert int(is_newline.sum()) == 6
    kept = reducer.kept_tokens(51)
    assert int(merged.slots[0].sum()) == len(merged.tokens[0]) == kept
    assert int((merged.slots[0] & is_newline).sum()) == newlines
    count = min(kept, 45)
    parts = (states.tokens[0], states.received[0], states.keys[0])
    dominant, places, merged_cC = zipped(*(part[~is_newline] for part in parts), count, 0)
    expected = states.tokens[0][~is_newline].index_copy(0, places, merged_cC)
    taken = torch.cat([dominant, places]).sort().values
    assert torch.equal(merged.tokens[0][~is_newline[merged.slots[0]]], expected[taken])


@pytest.mark.parametrize("pictures", [1, 2], ids=["video", "video-and-image"])
@torch.no_grad()
def test_prompts_with_videos_are_the_backbone(family, pictures):
    """A video alone bit for bit; beside an image the tower runs once, transformers' twice."""
    video = Video(tuple(noise(30, 44, seed) for seed in range(3)))
    given = inputs_of(family, "what moves?", [video, noise(20, 30)][:pictures])
    batch = batch_from_inputs(family, given["input_ids"], given["attention_mask"].bool(), given, None)
    expected = family.model(**given, use_cache=False).logits
    neutral = compress(family, ALL_GROUPS, name="fastv", keep_ratio=1.0)
    got = neutral.logits(neutral.run(batch))
    assert torch.equal(got, expected) if pictures == 1 else torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("ratio", [0.25, 0.5])
@torch.no_grad()
def test_visionzip_keeps_a_share_of_every_frame(family, ratio):
    video = Video(tuple(noise(30, 44, seed) for seed in range(4)))
    given = inputs_of(family, "what moves?", [video])
    batch = batch_from_inputs(family, given["input_ids"], given["attention_mask"].bool(), given, None)
    rows = compress(family, name="visionzip", keep_ratio=ratio).run(batch).rows
    visual = rows.index_BM[0, rows.regions_BM[0] == Region.VISUAL] - 3
    assert (visual // FRAME).bincount().tolist() == [4 * ratio] * 4


@pytest.mark.parametrize("shown", ["image", "images", "video"])
def test_greedy_generation_is_transformers(family, shown):
    pictures = {
        "image": [noise(20, 30)],
        "images": [noise(20, 30), noise(40, 30, 1)],
        "video": [Video(tuple(noise(30, 44, seed) for seed in range(3)))],
    }[shown]
    given = inputs_of(family, "what is shown?", pictures)
    expected = family.model.generate(**given, max_new_tokens=12, do_sample=False)
    model = SubTokenModel.around(compress(family, ALL_GROUPS))
    assert torch.equal(model.generate(**given, max_new_tokens=12, do_sample=False), expected)
