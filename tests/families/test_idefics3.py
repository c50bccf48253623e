"""Idefics3 and SmolVLM: tiles, their marks, and what merged tokens receive."""

import pytest
import torch
from PIL import Image

from subtoken_train.types import Region
from tests.support.tiny.idefics3 import GRIDS, KINDS, SIZES, idefics_family, tiler
from tests.support.tiny_parts import noises, padded, three_records

TILES = [rows * columns + 1 for rows, columns in GRIDS]


@pytest.fixture(scope="module", params=KINDS)
def family(request):
    return idefics_family(request.param)


def test_marks_of_tiles_are_text_that_stays(family, tmp_path):
    batch = padded(family, three_records(tmp_path, SIZES))
    assert len(batch.pixel_values) == sum(TILES)
    ids, regions = batch.input_ids_BN[0], batch.regions_BN[0]
    visual = regions == Region.VISUAL
    first, last = visual.nonzero()[[0, -1], 0].tolist()
    assert family.tokenizer.decode(ids[first - 2 : first]) == "<fake_token_around_image><row_1_col_1>"
    between = family.tokenizer.decode(ids[first : last + 2][~visual[first : last + 2]])
    fake, marks = "<fake_token_around_image>", [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2, 3)]
    rows = [fake + fake.join(marks[1:3]), fake + fake.join(marks[3:])]
    assert between == "\n".join([*rows, "", f"{fake}<global-img>{fake}"])
    assert set(regions[first : last + 1][~visual[first : last + 1]].tolist()) == {int(Region.QUERY)}


def test_tiles_are_counted_as_the_image_processor_cuts_them():
    """Also where the longer side is no whole number of tiles, and transformers' own count is another."""
    family = idefics_family()
    sizes = [(1, 1), (1, 90), (90, 1), (33, 64), (64, 33), (97, 96), (50, 50), (500, 700), (63, 190)]
    for longest in (32, 64, 96, 100, 130):
        family.longest = longest
        cut = tiler()(
            [[Image.new("RGB", size[::-1])] for size in sizes], size={"longest_edge": longest}, return_row_col_info=True
        )
        assert [family.grid(size) for size in sizes] == [
            (rows[0], columns[0]) for rows, columns in zip(cut["rows"], cut["cols"], strict=True)
        ]


def test_a_checkpoint_that_does_not_cut_sees_wholes():
    family, images = idefics_family(), noises(SIZES)
    whole = type(family)(family.model, type(family.processor)(tiler(do_image_splitting=False), family.tokenizer))
    assert whole.visual_tokens(SIZES[0]) == 4
    assert len(whole.process_images(images)[0]) == len(images)


@torch.no_grad()
def test_a_token_receives_the_mean_of_its_patches(family, tmp_path):
    batch, tower = padded(family, three_records(tmp_path, SIZES)), family.model.model.vision_model
    states = family.visual_states(batch, "received")
    tower.set_attn_implementation("eager")
    seen = tower(batch.pixel_values, output_attentions=True)
    tower.set_attn_implementation("sdpa")
    received_Ihw = seen.attentions[-1].mean(1).sum(1).unflatten(1, (4, 4))
    expected_I22 = received_Ihw.unfold(1, 2, 2).unfold(2, 2, 2).mean((-1, -2))
    torch.testing.assert_close(torch.stack(states.received), expected_I22.flatten(1))
    assert states.cls is None
    assert [tuple(keys.shape) for keys in states.keys] == [(4, 16)] * sum(TILES)
    features = family.project(torch.cat(states.tokens))
    own = family.model.get_image_features(batch.pixel_values[None]).pooler_output[0]
    torch.testing.assert_close(features, own)
