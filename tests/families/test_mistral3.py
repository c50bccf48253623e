"""The Mistral3 family: marks between the rows of a picture, and what merged tokens receive."""

import pytest
import torch

from subtoken_train.types import Region
from tests.support.helpers import eager_calls
from tests.support.tiny.mistral3 import GRIDS, SIZES, mistral3_family
from tests.support.tiny_parts import padded, three_records

TOKENS = [rows * columns for rows, columns in GRIDS]


@pytest.fixture(scope="module", params=["mistral", "ministral3"])
def family(request):
    return mistral3_family(request.param)


def test_marks_of_rows_are_text_that_stays(family, tmp_path):
    batch = padded(family, three_records(tmp_path, SIZES))
    ids, visual = batch.input_ids_BN[0], batch.regions_BN[0] == Region.VISUAL
    first, last = visual.nonzero()[[0, -1], 0].tolist()
    between = ~visual[first : last + 2]
    assert family.tokenizer.decode(ids[first : last + 2][between]) == "[IMG_BREAK][IMG_END]"
    assert between.nonzero()[:, 0].tolist() == [4, 9]
    assert set(batch.regions_BN[0, first : last + 2][between].tolist()) == {int(Region.QUERY)}


@torch.no_grad()
def test_a_token_receives_the_mean_of_its_patches(family, tmp_path, monkeypatch):
    batch, tower = padded(family, three_records(tmp_path, SIZES)), family.model.model.vision_tower
    states, attention = family.visual_states(batch, "received"), tower.transformer.layers[-1].attention
    ((weights, key),) = eager_calls(tower, attention, lambda: family.visual_states(batch), monkeypatch)
    weights_HPP, key_HPd = weights[0], key[0]
    lengths = [4 * count for count in TOKENS]
    received, keys = weights_HPP.mean(0).sum(0).split(lengths), key_HPd.mean(0).split(lengths)
    for i, (rows, columns) in enumerate(GRIDS):
        grid = received[i].view(rows, 2, columns, 2)
        torch.testing.assert_close(states.received[i], grid.mean((1, 3)).flatten(), rtol=1e-4, atol=1e-5)
        grid = keys[i].view(rows, 2, columns, 2, -1)
        torch.testing.assert_close(states.keys[i], grid.mean((1, 3)).flatten(0, 1), rtol=1e-4, atol=1e-5)
    assert [len(tokens) for tokens in states.tokens] == TOKENS
    shown = family.given_images(batch.pixel_values, batch.image_grid_I3, batch.input_ids_BN)
    own = family.model.get_image_features(shown["pixel_values"], image_sizes=shown["image_sizes"]).pooler_output
    torch.testing.assert_close(family.project(torch.cat(states.tokens)), torch.cat(own))
