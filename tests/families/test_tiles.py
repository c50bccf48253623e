"""Tiles of any resolution, beside transformers' own models and processors, over many sizes."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from transformers import LlavaNextProcessor, LlavaOnevisionProcessor
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

from subtoken_train.families.tiles import TileLayout, joined_tiles, ordered_pictures, padded_tiles, pictures_per_sample

NEXT = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]
ONEVISION = [(384 * high, 384 * wide) for high, wide in product(range(1, 7), repeat=2)]
EDGES = [(1, 1), (1, 700), (700, 1), (3, 1000), (336, 336), (337, 336), (335, 673), (24, 25), (1008, 336), (4000, 61)]


def random_sizes(count: int) -> list[tuple[int, int]]:
    drawn = torch.randint(1, 2600, (count, 2), generator=torch.Generator().manual_seed(0))
    return EDGES + [tuple(size) for size in drawn.tolist()]


def next_config(resolutions=NEXT, side=336, patch=14):
    vision = SimpleNamespace(image_size=side, patch_size=patch)
    return SimpleNamespace(vision_config=vision, image_grid_pinpoints=[list(each) for each in resolutions])


def next_reference(config, tiles_IPC, size, newline_C):
    packed, _ = LlavaNextModel.pack_image_features(
        SimpleNamespace(config=config), [tiles_IPC], torch.tensor([size]), "default", newline_C
    )
    return packed[0]


def onevision_reference(config, tiles_IPC, size, newline_C, most):
    packed, _ = LlavaOnevisionModel.pack_image_features(
        SimpleNamespace(config=config), [tiles_IPC], torch.tensor([size]), newline_C, f"anyres_max_{most}"
    )
    return packed[0]


def next_processor(patch=14) -> SimpleNamespace:
    own = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=NEXT), patch_size=patch, num_additional_image_tokens=0
    )
    own._get_unpadded_features = lambda *given: LlavaNextProcessor._get_unpadded_features(own, *given)
    return own


def onevision_processor(most: int) -> SimpleNamespace:
    own = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=ONEVISION),
        num_image_tokens=729,
        vision_aspect_ratio=f"anyres_max_{most}",
    )
    own._get_unpadded_features = lambda *given: LlavaOnevisionProcessor._get_unpadded_features(own, *given)
    return own


@pytest.mark.slow
def test_placeholders_are_what_the_processors_write():
    """Model and processor have been one row apart in transformers' history: a wide sweep of sizes."""
    next_layout = TileLayout.of(next_config())
    one = TileLayout.of(next_config(ONEVISION, 384), most_tiles=9)
    assert (next_layout.whole, one.whole) == (576, 729)
    writes_next, writes_one = next_processor(), onevision_processor(9)
    for size in random_sizes(4000):
        assert next_layout.placeholders(size) == LlavaNextProcessor._get_number_of_features(
            writes_next, *size, 336, 336
        )
        assert one.placeholders(size) == LlavaOnevisionProcessor._get_number_of_features(writes_one, *size, 384, 384)


def test_packing_is_transformers_own_over_many_sizes():
    config, generator = next_config(), torch.Generator().manual_seed(1)
    layout, newline_C = TileLayout.of(config), torch.randn(2, generator=generator)
    for size in random_sizes(150):
        tiles_IPC = torch.randn(layout.tiles(size), 576, 2, generator=generator)
        packed_TC = layout.pack(tiles_IPC, size, newline_C)
        assert len(packed_TC) == layout.placeholders(size)
        torch.testing.assert_close(packed_TC, next_reference(config, tiles_IPC, size, newline_C), rtol=0, atol=0)


@pytest.mark.parametrize("most", [2, 9])
def test_crops_of_too_many_patches_are_scaled_as_onevision_does(most):
    """Of 27 x 27 patches a tile, odd crops among them."""
    config, generator = next_config(ONEVISION, 384), torch.Generator().manual_seed(2)
    layout, newline_C = TileLayout.of(config, most), torch.randn(2, generator=generator)
    scaled = 0
    for size in random_sizes(60):
        tiles_IPC = torch.randn(layout.tiles(size), 729, 2, generator=generator)
        packed_TC = layout.pack(tiles_IPC, size, newline_C)
        assert len(packed_TC) == layout.placeholders(size)
        expected_TC = onevision_reference(config, tiles_IPC, size, newline_C, most)
        torch.testing.assert_close(packed_TC, expected_TC, rtol=0, atol=0)
        scaled += len(packed_TC) < TileLayout.of(config).placeholders(size)
    assert 5 < scaled <= 60


def test_a_picture_that_is_not_cut_ends_with_one_newline():
    layout, tile_1PC = TileLayout(((4, 4),), 4, 2), torch.arange(8.0).reshape(1, 4, 2)
    packed_TC = layout.pack(tile_1PC, (9, 3), torch.tensor([-1.0, -2.0]))
    assert layout.placeholders((9, 3), cut=False) == len(packed_TC) == 5
    assert packed_TC.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [-1, -2]]


def test_rows_of_patches_run_across_tiles():
    """A picture of two tiles side by side, uncropped: each row is of both, a newline at its end."""
    layout = TileLayout(((2, 4),), 2, 2)
    tiles_IPC = torch.arange(12.0).reshape(3, 4, 1)
    packed_TC = layout.pack(tiles_IPC, (10, 20), torch.tensor([-1.0]))
    assert packed_TC[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 8, 9, -1, 6, 7, 10, 11, -1]
    assert layout.crop((10, 20)) == (2, 4)
    assert layout.tiles((10, 20)) == 3


def test_tiles_are_padded_with_zeros_and_read_back():
    tiles = torch.arange(1.0, 7.0)[:, None, None, None].expand(6, 3, 2, 2)
    padded = padded_tiles(tiles, [3, 1, 2])
    assert padded[:, :, 0, 0, 0].tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0]]
    assert padded.shape == (3, 3, 3, 2, 2)
    assert torch.equal(joined_tiles(padded, [3, 1, 2]), tiles)


def marked(*counts):
    """Prompts of so many placeholders."""
    visual = torch.zeros(len(counts), 12, dtype=torch.bool)
    for row, count in zip(visual, counts, strict=True):
        row[1 : 1 + count] = True
    return visual


@pytest.mark.parametrize(
    ("tokens", "prompts", "pictures"),
    [
        ([4, 3, 5], (4, 8), [1, 2]),
        ([4, 3, 5], (0, 7, 0, 5), [0, 2, 0, 1]),
        ([4, 4, 4], (4, 4, 4), [1, 1, 1]),
        ([], (0, 0), [0, 0]),
    ],
)
def test_pictures_go_to_the_prompts_that_have_their_placeholders(tokens, prompts, pictures):
    assert pictures_per_sample(tokens, marked(*prompts)).tolist() == pictures


@pytest.mark.parametrize(("tokens", "prompts"), [([4, 3], (4, 2)), ([4, 3], (4,)), ([4], (4, 3)), ([4, 3], (3, 4))])
def test_pictures_that_fit_no_division_are_refused(tokens, prompts):
    with pytest.raises(ValueError, match=r"pictures of \[4.* visual tokens but prompts of \[.* placeholders"):
        pictures_per_sample(tokens, marked(*prompts))


def test_images_and_videos_stand_in_the_order_of_their_placeholders():
    kinds = torch.tensor([[0, 2, 2, 2, 1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2, 2, 0, 0], [0] * 10])
    assert ordered_pictures(kinds, {1: [2, 3, 2], 2: [3, 4]}) == [[(2, 0), (1, 0), (1, 1)], [(1, 2), (2, 1)], []]
    with pytest.raises(ValueError, match=r"pictures of \[2, 3, 2, 4, 3\] visual tokens but prompts of \[8, 6, 0\]"):
        ordered_pictures(kinds, {1: [2, 3, 2], 2: [4, 3]})
