"""Tiles of any resolution beside the originals' own, marks between them, and what merged tokens receive."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

from subtoken_train.families.idefics3 import Idefics3Processor
from subtoken_train.families.images import Video
from subtoken_train.families.tiles import TileLayout
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from tests.support.helpers import compress, eager_calls
from tests.support.tiny import idefics3, mistral3, noises, padded, three_records
from tests.support.tiny.idefics3 import idefics_family, tiler
from tests.support.tiny.internvl import SIZES, TILES, internvl_family
from tests.support.tiny.mistral3 import mistral3_family

NEXT = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]
ONEVISION = [(384 * high, 384 * wide) for high, wide in product(range(1, 7), repeat=2)]
EDGES = [(1, 1), (1, 700), (700, 1), (3, 1000), (336, 336), (337, 336), (335, 673), (24, 25), (1008, 336), (4000, 61)]


@pytest.mark.parametrize("most", [None, 2, 9])
def test_packing_is_transformers_own_over_many_sizes(most):
    """Onevision scales crops of too many patches: of 27 x 27 a tile, odd ones among them."""
    vision = SimpleNamespace(image_size=384 if most else 336, patch_size=14)
    resolutions = [list(each) for each in (ONEVISION if most else NEXT)]
    config = SimpleNamespace(vision_config=vision, image_grid_pinpoints=resolutions)
    layout, generator = TileLayout.of(config, most), torch.Generator().manual_seed(1)
    newline_C = torch.randn(2, generator=generator)
    own = (LlavaOnevisionModel, newline_C, f"anyres_max_{most}") if most else (LlavaNextModel, "default", newline_C)
    scaled, made = 0, SimpleNamespace(config=config)
    drawn = torch.randint(1, 2600, (60 if most else 150, 2), generator=torch.Generator().manual_seed(0))
    for size in EDGES + [tuple(size) for size in drawn.tolist()]:
        tiles_IPC = torch.randn(layout.tiles(size), 729 if most else 576, 2, generator=generator)
        packed_TC = layout.pack(tiles_IPC, size, newline_C)
        assert len(packed_TC) == layout.placeholders(size)
        theirs, _ = own[0].pack_image_features(made, [tiles_IPC], torch.tensor([size]), *own[1:])
        torch.testing.assert_close(packed_TC, theirs[0], rtol=0, atol=0)
        scaled += len(packed_TC) < TileLayout.of(config).placeholders(size)
    assert 5 < scaled <= 60 if most else scaled == 0


def test_a_video_is_a_line_per_frame():
    family = internvl_family()
    frames = [image.resize((40, 30)) for image in noises(SIZES)[:3]]
    given = inputs_of(family, "<video>\nwhat happens?", [Video(tuple(frames))])
    shown = "<img>" + "<IMG_CONTEXT>" * 4 + "</img>"
    words = f"<|im_start|>user\nFrame1: {shown}\nFrame2: {shown}\nFrame3: {shown}\nwhat happens?<|im_end|>\n"
    assert family.tokenizer.decode(given["input_ids"][0]) == f"{words}<|im_start|>assistant\n"
    whole = family.processor.image_processor(frames, crop_to_patches=False, return_tensors="pt")["pixel_values"]
    assert torch.equal(given["pixel_values"], whole)
    batch = batch_from_inputs(family, given["input_ids"], given["attention_mask"].bool(), given, None)
    assert batch.images_per_sample_B.tolist() == [3]  # frames by frames, as transformers' processor gives them
    expected = family.model.generate(**given, max_new_tokens=5, do_sample=False)
    model = SubTokenModel.around(compress(family))
    assert torch.equal(model.generate(**given, max_new_tokens=5, do_sample=False), expected)


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
    family, images = idefics_family(), noises(idefics3.SIZES)
    whole = type(family)(family.model, Idefics3Processor(tiler(do_image_splitting=False), family.tokenizer))
    assert whole.visual_tokens(idefics3.SIZES[0]) == 4
    assert len(whole.process_images(images)[0]) == len(images)


@pytest.mark.parametrize("kind", ["internvl", *idefics3.KINDS])
def test_a_token_receives_the_mean_of_its_four_patches(kind, tmp_path):
    """Of the class token's attention, or without one of all patches' of the tile; tokens stand row by row."""
    classes = kind == "internvl"
    family = internvl_family() if classes else idefics_family(kind)
    batch = padded(family, three_records(tmp_path, SIZES if classes else idefics3.SIZES))
    states = family.visual_states(batch, "received")
    tower = family.model.model.vision_tower if classes else family.model.model.vision_model
    tower.set_attn_implementation("eager")
    seen = tower(batch.pixel_values, output_attentions=True).attentions[-1]
    tower.set_attn_implementation("sdpa")
    received_IP = seen[:, :, 0, 1:].sum(1) if classes else seen.mean(1).sum(1)
    expected_I22 = received_IP.unflatten(1, (4, 4)).unfold(1, 2, 2).unfold(2, 2, 2).mean((-1, -2))
    torch.testing.assert_close(torch.stack(states.received), expected_I22.flatten(1))
    assert states.cls is None
    tiles = sum(TILES) if classes else sum(rows * columns + 1 for rows, columns in idefics3.GRIDS)
    assert [tuple(keys.shape) for keys in states.keys] == [(4, 16)] * tiles
    assert not classes or family.visual_states(batch, "unsplit").keys[0].shape == (4, 32)
    own = family.model.get_image_features(batch.pixel_values if classes else batch.pixel_values[None]).pooler_output
    own = own.flatten(0, 1) if classes else own[0]
    torch.testing.assert_close(family.project(torch.cat(states.tokens)), own)


@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
def test_a_token_of_a_picture_of_any_size_receives_the_mean_of_its_patches(kind, tmp_path, monkeypatch):
    family, tokens = mistral3_family(kind), [rows * columns for rows, columns in mistral3.GRIDS]
    batch, tower = padded(family, three_records(tmp_path, mistral3.SIZES)), family.model.model.vision_tower
    states, attention = family.visual_states(batch, "received"), tower.transformer.layers[-1].attention
    ((weights, key),) = eager_calls(tower, attention, lambda: family.visual_states(batch), monkeypatch)
    weights_HPP, key_HPd = weights[0], key[0]
    lengths = [4 * count for count in tokens]
    received, keys = weights_HPP.mean(0).sum(0).split(lengths), key_HPd.mean(0).split(lengths)
    for i, (rows, columns) in enumerate(mistral3.GRIDS):
        grid = received[i].view(rows, 2, columns, 2)
        torch.testing.assert_close(states.received[i], grid.mean((1, 3)).flatten(), rtol=1e-4, atol=1e-5)
        grid = keys[i].view(rows, 2, columns, 2, -1)
        torch.testing.assert_close(states.keys[i], grid.mean((1, 3)).flatten(0, 1), rtol=1e-4, atol=1e-5)
    assert [len(tokens) for tokens in states.tokens] == tokens
    shown = family.given_images(batch.pixel_values, batch.image_grid_I3, batch.input_ids_BN)
    own = family.model.get_image_features(shown["pixel_values"], image_sizes=shown["image_sizes"]).pooler_output
    torch.testing.assert_close(family.project(torch.cat(states.tokens)), torch.cat(own))
