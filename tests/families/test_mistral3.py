"""The Mistral3 family: chat format, rows of a picture's tokens, transformers' own inputs, logits and answers."""

import pytest
import torch
from PIL import Image
from transformers.models.pixtral import modeling_pixtral

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.images import Video
from subtoken_train.families.load import layout_family
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from subtoken_train.types import Region, Turn
from tests.support.own_forward import check_answers, check_logits
from tests.support.tiny.mistral3 import GRIDS, SIZES, mistral3_family, mistral3_records, their_inputs
from tests.support.tiny_parts import noises, padded

PROMPTS = [
    "<s>[INST][IMG]where is it?[/INST]",
    "<s>[INST][IMG][IMG]which?[/INST]this</s>[INST]and[IMG]now?[/INST]",
    "<s>[INST]who are you?[/INST]",
]
TOKENS = [rows * columns for rows, columns in GRIDS]


@pytest.fixture(scope="module", params=["mistral", "ministral3"])
def family(request):
    return mistral3_family(request.param)


@pytest.fixture(scope="module")
def images():
    return noises(SIZES)


def batch_of(family, given):
    return batch_from_inputs(family, given["input_ids"], given["attention_mask"].bool(), given, None)


def test_the_format_is_the_published_template(family):
    turns = [Turn("<image>\nwhere is it?", " left "), Turn("and\n<image>\n<image>\nnow?", "right"), Turn("last")]
    rendered = family.render(turns)
    assert rendered.text == (
        "<s>[INST][IMG]where is it?[/INST]left</s>[INST]and[IMG][IMG]now?[/INST]right</s>[INST]last[/INST]"
    )
    assert [rendered.text[start:stop] for start, stop in rendered.answer_spans] == ["left</s>", "right</s>"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_inputs_are_read_and_written_as_transformers_makes_them(family, images, side):
    given = their_inputs(family, [*PROMPTS], images, side)
    batch = batch_of(family, given)
    assert (batch.regions_BN == Region.VISUAL).sum(-1).tolist() == [TOKENS[0], sum(TOKENS[1:]), 0]
    assert batch.images_per_sample_B.tolist() == [1, 3, 0]
    pixels, grid = family.process_images(images)
    assert torch.equal(batch.pixel_values, pixels)
    assert batch.image_grid_I3.tolist() == grid.tolist() == [[1, 2 * rows, 2 * columns] for rows, columns in GRIDS]
    back = family.given_images(batch.pixel_values, batch.image_grid_I3, batch.input_ids_BN)
    assert torch.equal(back["pixel_values"], given["pixel_values"])
    assert torch.equal(back["image_sizes"], given["image_sizes"])
    ours, alone = inputs_of(family, "where is it?", images[:1]), their_inputs(family, PROMPTS[:1], images[:1], side)
    assert all(torch.equal(ours[name], alone[name]) for name in alone)


def test_marks_of_rows_are_text_that_stays(family, tmp_path):
    batch = padded(family, mistral3_records(tmp_path))
    ids, visual = batch.input_ids_BN[0], batch.regions_BN[0] == Region.VISUAL
    first, last = visual.nonzero()[[0, -1], 0].tolist()
    between = ~visual[first : last + 2]
    assert family.tokenizer.decode(ids[first : last + 2][between]) == "[IMG_BREAK][IMG_END]"
    assert between.nonzero()[:, 0].tolist() == [4, 9]
    assert set(batch.regions_BN[0, first : last + 2][between].tolist()) == {int(Region.QUERY)}
    decoded = [family.tokenizer.decode(row[row != -100]) for row in batch.labels_BN]
    assert decoded == ["the left</s>", "left</s>right</s>", "there</s>"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_are_transformers_own(family, images, side):
    given = their_inputs(family, [*PROMPTS], images, side)
    check_logits(family, given, batch_of(family, given), side)


def test_answers_are_transformers_own(family, images):
    check_answers(family, their_inputs(family, [*PROMPTS], images, "left"))


@torch.no_grad()
def test_a_token_receives_the_mean_of_its_patches(family, tmp_path, monkeypatch):
    batch, tower = padded(family, mistral3_records(tmp_path)), family.model.model.vision_tower
    states, original, seen = family.visual_states(batch, "received"), modeling_pixtral.eager_attention_forward, []

    def recording(module, query, key, *args, **options):
        output, weights = original(module, query, key, *args, **options)
        seen.append((weights[0], key[0]))
        return output, weights

    monkeypatch.setattr(modeling_pixtral, "eager_attention_forward", recording)
    tower.set_attn_implementation("eager")
    family.visual_states(batch)
    tower.set_attn_implementation("sdpa")
    weights_HPP, key_HPd = seen[-1]
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


@pytest.mark.parametrize("name", ["mistralai/Mistral-Small-3.1-24B-Instruct-2503"])
def test_published_models(name):
    family = layout_family(BackboneConfig(name, dtype="bfloat16"))
    own = family.shape
    assert (own.num_layers, own.num_kv_heads, own.head_dim) == (40, 8, 128)
    assert sum(parameter.numel() for parameter in family.model.parameters()) == 24_011_361_280
    assert family.visual_tokens() == 24 * 32
    assert family.visual_tokens((3080, 1540)) == 55 * 28
    one = family.image_bytes()
    assert one == 3 * 672 * 896 * 4
    # the mask of two pictures spans both
    assert family.tower_bytes(2 * one) - 2 * family.tower_bytes(one) == 2 * 2 * (48 * 64) ** 2
    family.limit_pixels(900_000)
    assert (family.longest, family.visual_tokens((2000, 2000))) == (924, 33 * 33)


def test_what_it_does_not_take_is_refused_in_words(images):
    with pytest.raises(ValueError, match=r"vision_feature_layer -2 is not supported; -1 is"):
        mistral3_family(vision_feature_layer=-2)
    family = mistral3_family()
    with pytest.raises(ValueError, match="max_pixels=200 is below one visual token of mistral3, 256 pixels"):
        family.limit_pixels(200)
    with pytest.raises(ValueError, match="mistral3 takes images and no videos"):
        inputs_of(family, "<video> what?", [Video(tuple(images[:1]))])
    with pytest.raises(
        ValueError, match="1 x 900 pixels: mistral3 scales the longer side to 224, which leaves nothing"
    ):
        inputs_of(family, "what?", [Image.new("RGB", (900, 1))])
    given = their_inputs(family, [*PROMPTS], images, "left")
    with pytest.raises(ValueError, match="in multiples of 16; pass the processor's whole output"):
        batch_of(family, {**given, "image_sizes": given["image_sizes"] - 8})
    with pytest.raises(ValueError, match=r"pictures of .* visual tokens but prompts of"):
        batch_of(family, {**given, "pixel_values": given["pixel_values"][1:], "image_sizes": given["image_sizes"][1:]})
