"""Idefics3 and SmolVLM: chat format, tiles and their marks, transformers' own inputs, logits and answers."""

import pytest
import torch
from PIL import Image

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.images import Video
from subtoken_train.families.load import layout_family
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from subtoken_train.types import Region, Turn
from tests.support.own_forward import check_answers, check_logits
from tests.support.tiny.idefics3 import (
    GRIDS,
    KINDS,
    SIDE,
    SIZES,
    idefics_family,
    idefics_records,
    tiler,
    transformers_processor,
)
from tests.support.tiny_parts import noises, padded

PROMPTS = [
    "<|im_start|>User:<image>where is it?<end_of_utterance>\nAssistant:",
    "<|im_start|>User:<image><image>which?<end_of_utterance>\nAssistant: this<end_of_utterance>\n"
    "User: and<image>now?<end_of_utterance>\nAssistant:",
    "<|im_start|>User: who are you?<end_of_utterance>\nAssistant:",
]
TILES = [rows * columns + 1 for rows, columns in GRIDS]


@pytest.fixture(scope="module", params=KINDS)
def family(request):
    return idefics_family(request.param)


@pytest.fixture(scope="module")
def images():
    return noises(SIZES)


def processed(images, side):
    """Three prompts of one, three and no images as transformers' processor makes them."""
    nested = [images[:1], images[1:], []]
    return transformers_processor()(text=PROMPTS, images=nested, padding=True, padding_side=side, return_tensors="pt")


def batch_of(family, given):
    return batch_from_inputs(family, given["input_ids"], given["attention_mask"].bool(), given, None)


def test_the_format_is_the_published_template(family):
    turns = [Turn("<image>\nwhere is it?", " left "), Turn("and\n<image>\n<image>\nnow?", "right"), Turn("last")]
    rendered = family.render(turns)
    said = [["<image>", "where is it?"], ["and", "<image>", "<image>", "now?"], ["last"]]
    messages = []
    for parts, answer in zip(said, ("left", "right", None), strict=True):
        content = [{"type": "image"} if part == "<image>" else {"type": "text", "text": part} for part in parts]
        messages.append({"role": "user", "content": content})
        if answer is not None:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    expected = transformers_processor().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered.text == expected
    spans = [rendered.text[start:stop] for start, stop in rendered.answer_spans]
    assert spans == [" left<end_of_utterance>", " right<end_of_utterance>"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_and_pixels_are_what_transformers_processor_makes(family, images, side):
    given = processed(images, side)
    batch = batch_of(family, given)
    visual = batch.regions_BN == Region.VISUAL
    assert visual.sum(-1).tolist() == [4 * TILES[0], 4 * sum(TILES[1:]), 0]
    assert torch.equal(batch.pixel_values, family.process_images(images)[0])
    back = family.given_images(batch.pixel_values, None, batch.input_ids_BN)
    assert torch.equal(back["pixel_values"], given["pixel_values"])
    ours = inputs_of(family, "where is it?", images[:1])
    alone = transformers_processor()(text=PROMPTS[:1], images=images[:1], return_tensors="pt")
    assert torch.equal(ours["input_ids"], alone["input_ids"])
    assert torch.equal(ours["pixel_values"], alone["pixel_values"])


def test_marks_of_tiles_are_text_that_stays(family, tmp_path):
    batch = padded(family, idefics_records(tmp_path))
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
    decoded = [family.tokenizer.decode(row[row != -100]) for row in batch.labels_BN]
    end = "<end_of_utterance>"
    assert decoded == [f" the left{end}", f" left{end} right{end}", f" there{end}"]


def test_tiles_are_counted_as_the_image_processor_cuts_them():
    """Also where the longer side is no whole number of tiles, and transformers' own count is another."""
    family = idefics_family()
    sizes = [(1, 1), (1, 90), (90, 1), (33, 64), (64, 33), (97, 96), (50, 50), (500, 700), (63, 190)]
    for longest in (32, 64, 96, 100, 130):
        family.longest = longest
        cut = tiler()(
            [[Image.new("RGB", size[::-1])] for size in sizes],
            size={"longest_edge": longest},
            return_row_col_info=True,
        )
        assert [family.grid(size) for size in sizes] == [
            (rows[0], columns[0]) for rows, columns in zip(cut["rows"], cut["cols"], strict=True)
        ]


def test_a_checkpoint_that_does_not_cut_sees_wholes(images):
    family = idefics_family()
    whole = type(family)(family.model, type(family.processor)(tiler(do_image_splitting=False), family.tokenizer))
    assert whole.visual_tokens(SIZES[0]) == 4
    assert len(whole.process_images(images)[0]) == len(images)


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_are_transformers_own(family, images, side):
    given = processed(images, side)
    check_logits(family, given, batch_of(family, given), side)


def test_answers_are_transformers_own(family, images):
    check_answers(family, processed(images, "left"))


@torch.no_grad()
def test_a_token_receives_the_mean_of_its_patches(family, tmp_path):
    batch, tower = padded(family, idefics_records(tmp_path)), family.model.model.vision_model
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


@pytest.mark.parametrize(
    ("name", "weights", "tokens", "shape"),
    [
        ("HuggingFaceTB/SmolVLM-256M-Instruct", 256_484_928, 64, (30, 3, 64)),
        ("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", 507_482_304, 64, (32, 5, 64)),
        ("HuggingFaceTB/SmolVLM2-2.2B-Instruct", 2_246_784_880, 81, (24, 32, 64)),
        ("HuggingFaceM4/Idefics3-8B-Llama3", 8_462_086_384, 169, (32, 8, 128)),
    ],
)
def test_published_models(name, weights, tokens, shape):
    family = layout_family(BackboneConfig(name, dtype="bfloat16"))
    own = family.shape
    assert (own.num_layers, own.num_kv_heads, own.head_dim) == shape
    assert sum(parameter.numel() for parameter in family.model.parameters()) == weights
    assert family.visual_tokens() == 13 * tokens
    assert family.visual_tokens((640, 480)) == 13 * tokens
    assert family.image_bytes() == 13 * 3 * family.side**2 * 4
    family.limit_pixels(family.side**2 * 5)
    assert [family.visual_tokens(size) for size in ((480, 640), (100, 400), (9, 9))] == [
        5 * tokens,
        3 * tokens,
        5 * tokens,
    ]
    family.limit_pixels(family.side**2)
    assert family.visual_tokens((480, 640)) == tokens


def test_what_it_does_not_take_is_refused_in_words(family, images):
    with pytest.raises(ValueError, match=r"4 x 4 patches and scale_factor 3 is not supported"):
        idefics_family(family.name, scale_factor=3)
    with pytest.raises(ValueError, match=rf"max_pixels=1000 is below one tile of {family.name}, 1024 pixels"):
        family.limit_pixels(1000)
    with pytest.raises(ValueError, match=rf"{family.name} takes images and no videos"):
        inputs_of(family, "<video> what?", [Video(tuple(images[:1]))])
    given = processed(images, "left")
    with pytest.raises(ValueError, match=r"must be \[prompts, tiles, 3, height, width\]"):
        batch_of(family, given | {"pixel_values": given["pixel_values"][0]})
    with pytest.raises(ValueError, match=r"tiles of \[3, 32, 16\]: this .* takes \[3, 32, 32\]"):
        batch_of(family, given | {"pixel_values": given["pixel_values"][..., :16]})
    with pytest.raises(ValueError, match=r"28 image tokens for 6 tiles: .* takes 4 for each tile"):
        batch_of(
            family,
            given
            | {"pixel_values": given["pixel_values"] * torch.ones(3, 21, 1, 1, 1).index_fill(1, torch.tensor(0), 0)},
        )
    mask = given["pixel_attention_mask"].clone()
    mask[0, 0, 0, 0] = 0
    with pytest.raises(ValueError, match="pixel_attention_mask hides a part of a tile"):
        batch_of(family, given | {"pixel_attention_mask": mask})


def test_an_image_processor_of_another_size_is_refused(images):
    family = idefics_family()
    family.processor.image_processor.max_image_size = {"longest_edge": SIDE // 2}
    with pytest.raises(ValueError, match="use the processor of the same checkpoint"):
        family.process_images(images)
