"""Tiles of a batch one after another, padded as processors pad them, and whose they are."""

import pytest
import torch

from subtoken_train.families.tiles import joined_tiles, ordered_pictures, padded_tiles, pictures_per_sample


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
    assert ordered_pictures(kinds, {1: [2, 3, 2], 2: [3, 4]}) == [
        [(2, 0), (1, 0), (1, 1)],
        [(1, 2), (2, 1)],
        [],
    ]
    with pytest.raises(ValueError, match=r"pictures of \[2, 3, 2, 4, 3\] visual tokens but prompts of \[8, 6, 0\]"):
        ordered_pictures(kinds, {1: [2, 3, 2], 2: [4, 3]})
