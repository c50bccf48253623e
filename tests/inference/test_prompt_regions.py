"""Regions of prompts that come from a processor, and prompts that end with their context."""

from __future__ import annotations

import pytest
import torch

from checkpoints.tiny_llama import build_tokenizer
from subtoken_train.cache.cache import PackedCache
from subtoken_train.datasets.text_batches import context_tokens
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import prefill
from subtoken_train.inference.prompt_inputs import batch_from_inputs
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.generation_cells import generate_greedy
from tests.support.helpers import compress, gqa_family, make_batch, only_sample
from tests.support.text_families import text_family
from tests.support.tiny.qwen import qwen_batch, qwen_family, qwen_records
from tests.support.truth_models import family_of, prompts


def inputs_of(batch):
    mask = batch.regions_BN != Region.PADDING
    return batch.input_ids_BN, mask, {"pixel_values": batch.pixel_values, "image_grid_thw": batch.image_grid_I3}


@pytest.mark.parametrize("pad_left", [False, True])
def test_llava_regions(tiny_family, pad_left):
    expected = make_batch([(1, 6), (2, 9), (0, 5)], pad_left)
    batch = batch_from_inputs(tiny_family, *inputs_of(expected), None)
    regions = expected.regions_BN.masked_fill(expected.regions_BN == Region.ANSWER, int(Region.QUERY))
    text = expected.images_per_sample_B == 0  # nothing comes before an image that is not there
    regions[text] = regions[text].masked_fill(regions[text] == Region.SYSTEM, int(Region.QUERY))
    assert torch.equal(batch.regions_BN, regions)
    assert batch.images_per_sample_B.tolist() == [1, 2, 0]
    assert batch.rank_position_B[2] == -1
    last = [int((row != Region.PADDING).nonzero().max()) for row in regions]
    assert batch.rank_position_B[:2].tolist() == last[:2]
    assert (batch.labels_BN == -100).all()


@pytest.mark.parametrize("pad_left", [False, True])
def test_qwen_regions_and_images(tmp_path, pad_left):
    family = qwen_family()
    expected = qwen_batch(family, qwen_records(tmp_path), pad_left=pad_left, generation=True)
    batch = batch_from_inputs(family, *inputs_of(expected), None)
    assert torch.equal(batch.regions_BN == Region.VISUAL, expected.regions_BN == Region.VISUAL)
    assert torch.equal(batch.regions_BN == Region.PADDING, expected.regions_BN == Region.PADDING)
    assert torch.equal(batch.rank_position_B, expected.rank_position_B)
    assert batch.images_per_sample_B.tolist() == [1, 2, 0]
    backbone = compress(family, name="fastv", keep_ratio=0.5)
    logits = [prefill(backbone, x, PackedCache(4), Compression()).logits_BV for x in (batch, expected)]
    assert torch.equal(logits[0], logits[1])


def text_ids(lengths, pad_left):
    width = max(lengths)
    ids, mask = torch.full((len(lengths), width), 0), torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        span = slice(width - length, width) if pad_left else slice(0, length)
        ids[row, span] = torch.randint(10, 60, (length,), generator=torch.Generator().manual_seed(row))
        mask[row, span] = 1
    return ids, mask


@pytest.mark.parametrize("pad_left", [False, True])
def test_text_regions_split_each_sample(pad_left):
    ids, mask = text_ids([100, 70], pad_left)
    for length, expected in ((None, [36, 6]), (10, [10, 10])):
        batch = batch_from_inputs(text_family(), ids, mask, {}, length)
        assert (batch.regions_BN == Region.CONTEXT).sum(-1).tolist() == expected
        for row in range(2):
            real = batch.regions_BN[row][mask[row]].tolist()
            assert real == [Region.CONTEXT] * expected[row] + [Region.QUERY] * (len(real) - expected[row])
        assert torch.equal(batch.regions_BN == Region.PADDING, mask == 0)
        assert batch.rank_position_B.tolist() == ([99, 99] if pad_left else [99, 69])


SHOTS = "Q: how many legs has a spider?\nA: eight\n\n" * 6 + "Q: how many has a bee?\nA:"
ASKS_64 = ["one line of words " * 40, "a\n\n" + "words after a heading " * 40, "words and words " * 40 + "\n\n"]


def test_few_shot_prompts_ask_after_their_last_blank_line_and_others_with_64_tokens():
    family = text_family()
    family.processor = build_tokenizer()
    ids = [family.tokenizer(text)["input_ids"] for text in (SHOTS, *ASKS_64)]
    context = family.tokenizer.decode(ids[0][: context_tokens(family, ids[0])])
    assert context.rstrip("\n") == "<s>" + SHOTS.rpartition("\n\n")[0]
    assert [len(own) - context_tokens(family, own) for own in ids[1:]] == [64] * 3


@pytest.mark.parametrize("routing", [None, RoutingConfig(num_groups=8, kept_groups=2, budget="global")])
@torch.no_grad()
def test_short_prompts_are_not_compressed(routing):
    family = text_family()
    ids, mask = text_ids([40, 20], pad_left=True)
    batch = batch_from_inputs(family, ids, mask, {}, None)
    assert not (batch.regions_BN == Region.CONTEXT).any()
    quest = compress(family, routing, name="quest", keep_ratio=0.5, page_size=4, window=4)
    got = generate_greedy(quest, batch, 6)
    assert torch.equal(got.token_ids_BT, generate_greedy(compress(text_family()), batch, 6).token_ids_BT)
    assert [layer.entries_BN.ge(0).sum(-1).tolist() for layer in got.plan.layers] == [[40, 20]] * 3


SEES = family_of("llava")
IDS, MASK = text_ids([20], pad_left=False)
PIXELS = {"pixel_values": torch.zeros(1, 3, 96, 96)}
PICTURES = inputs_of(make_batch([(1, 6)]))[:2]
UNFIT = {
    "negative": (text_family(), IDS, MASK, {}, -1, "context_length=-1 must lie between 0 and 19: prompt 0 has 20"),
    "all": (text_family(), IDS, MASK, {}, 20, "context_length=20 must lie between 0 and 19"),
    "half": (text_family(), IDS, MASK, {}, 3.5, "context_length=3.5 must be a whole number of tokens"),
    "pixels": (text_family(), IDS, MASK, PIXELS, None, "pixel_values were given, but a language model sees no images"),
    "unshown": (SEES, IDS, MASK, PIXELS, None, "0 image tokens in the prompt but some pixel_values"),
    "no pixels": (SEES, *PICTURES, {}, None, r"\d+ image tokens in the prompt but no pixel_values"),
    "context": (SEES, IDS, MASK, {}, 4, "context_length is for language models; llava compresses the visual tokens"),
    "list": (SEES, IDS, MASK, {"pixel_values": [1]}, None, "pixel_values must be a tensor, not list"),
    "kinds": (SEES, IDS, MASK, {"mm_token_type_ids": torch.ones_like(IDS)}, None, "mm_token_type_ids do not mark the"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_inputs_that_do_not_fit_the_backbone(name):
    *given, words = UNFIT[name]
    with pytest.raises(ValueError, match=words):
        batch_from_inputs(*given)


@pytest.mark.parametrize("kind", ["llava", "qwen"])
def test_images_of_another_form_are_worded(kind, tmp_path):
    if kind == "llava":
        family, batch = gqa_family(), make_batch([(1, 6), (2, 9)])
        wrong = {"llava takes pixel_values; leave it out": [{"image_grid_thw": torch.ones(3, 3).long()}]}
        wrong |= {r"must be \[images, 3, height, width\]": [{"pixel_values": batch.pixel_values[0]}]}
    else:
        family = qwen_family()
        batch = qwen_batch(family, qwen_records(tmp_path), generation=True)
        grid = batch.image_grid_I3
        grids = [{"image_grid_thw": x} for x in (None, grid.float(), grid[:1], grid[0])]
        grids.append({"pixel_values": batch.pixel_values[None]})
        wrong = {r"must be \[patches, channels\] with image_grid_thw": grids}
    ids, mask, images = inputs_of(batch)
    for said, changes in wrong.items():
        for change in changes:
            with pytest.raises(ValueError, match=said):
                batch_from_inputs(family, ids, mask, images | change, None)
    assert batch_from_inputs(family, ids.int(), mask, images, None).input_ids_BN.dtype == torch.int64


A, V, P = int(Region.ANSWER), int(Region.VISUAL), int(Region.PADDING)
REDUCTIONS = {
    "fastv": {"stage": "embeds", "layer": 2},
    "fastv-decoder": {"stage": "decoder", "layer": 1},
    **{name: {} for name in ("visionzip", "random", "uniform", "cdpruner", "vispruner")},
    "dart": {"stage": "decoder", "layer": 1},
}


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
@torch.no_grad()
def test_answers_after_an_image_are_predicted_from_its_last_row(name, reduction, pad_left):
    """In training too: the image's last token stays, inside the budget, and the answer keeps its positions."""
    family, reducer = family_of(name), reduction.partition("-")[0]
    batch = prompts(family, "last", pad_left)
    answer = torch.full((3, 2), 11)
    joined = [torch.cat(pair, 1) for pair in ((batch.input_ids_BN, answer), (batch.regions_BN, torch.full((3, 2), A)))]
    if not pad_left:  # the answer stands right after the prompt
        for i, count in enumerate((batch.regions_BN != P).sum(-1).tolist()):
            for each in joined:
                each[i] = torch.cat([each[i, :count], each[i, -2:], each[i, count:-2]])
    batch.input_ids_BN, batch.regions_BN = joined
    batch.labels_BN = torch.where(batch.regions_BN == A, batch.input_ids_BN, -100)
    backbone = compress(family, name=reducer, keep_ratio=0.25, **REDUCTIONS[reduction]).eval()
    result = backbone.run(batch, pad_left=pad_left)
    own, anew = family.positions(batch), name == "llava" and reducer in ("visionzip", "vispruner")
    for i in range(3):
        real = result.rows.visible_BM[i]
        kept = result.rows.index_BM[i, real]
        visual = int((batch.regions_BN[i] == V).sum())
        assert int((batch.regions_BN[i, kept] == V).sum()) == backbone.reducer.kept_tokens(visual) or visual > 16
        if anew:
            continue
        place = kept.tolist().index(int((batch.regions_BN[i] == A).long().argmax()))
        assert kept[place - 1] == kept[place] - 1
        assert torch.equal(result.rows.position[..., i, real], own[..., i, kept])
        alone = backbone.run(only_sample(batch, i))
        torch.testing.assert_close(alone.hidden_BMD[0], result.hidden_BMD[i, real], rtol=1e-3, atol=1e-4)
