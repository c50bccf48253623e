"""Reducers and routers on families that see images: neutral settings are the backbone, a batch is its samples."""

import pytest
import torch

from subtoken_train.engine.attention_rows import row_attention
from subtoken_train.families.images import Video
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from subtoken_train.types import Region
from tests.support.helpers import ALL_GROUPS, REDUCTIONS, compress, gqa_family, make_batch
from tests.support.tiny.llava_onevision import noise, onevision_family, onevision_records
from tests.support.tiny.qwen import qwen_batch, qwen_family, qwen_records

KINDS = {
    "llava": (gqa_family, lambda folder: [(1, 9), (2, 7), (0, 12)], lambda family, *given: make_batch(*given)),
    "qwen": (qwen_family, qwen_records, qwen_batch),
    "onevision": (onevision_family, onevision_records, qwen_batch),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def family(kind):
    return KINDS[kind][0]()


@pytest.fixture
def batches(kind, family, tmp_path):
    """A batch of the records in a slice, padded on a side."""
    _, records, batch = KINDS[kind]
    return lambda part=slice(None), pad_left=False: batch(family, records(tmp_path)[part], pad_left)


def hf_logits(family, batch):
    """Transformers' own forward; Qwen's makes its mRoPE ids itself from the token types."""
    visible_BN = (batch.regions_BN != Region.PADDING).long()
    given = {"position_ids": (visible_BN.cumsum(-1) - 1).clamp(min=0), "pixel_values": batch.pixel_values}
    if family.name == "qwen2_5_vl":
        types_BN = (batch.input_ids_BN == family.image_token_id).int()
        given = {"image_grid_thw": batch.image_grid_I3, "mm_token_type_ids": types_BN, **given, "position_ids": None}
    elif family.name == "llava_onevision" and batch.pixel_values is not None:
        given |= family.given_images(batch.pixel_values, batch.image_grid_I3, batch.input_ids_BN)
        given["batch_num_images"] = batch.images_per_sample_B[batch.images_per_sample_B > 0]
    return family.model(batch.input_ids_BN, attention_mask=visible_BN, use_cache=False, **given).logits


@pytest.mark.parametrize("reducer", ["fastv", "visionzip"])
@pytest.mark.parametrize("pad_left", [False, True])
def test_neutral_settings_are_the_backbone_bit_for_bit(family, batches, pad_left, reducer):
    batch = batches(pad_left=pad_left)
    expected = hf_logits(family, batch)
    add_lora(family, LoraSettings(dropout=0.0))
    neutral, real = compress(family, ALL_GROUPS, name=reducer, keep_ratio=1.0), batch.regions_BN != Region.PADDING
    assert torch.equal(neutral.logits(neutral.run(batch))[real], expected[real])


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: "-".join(r.values()))
@pytest.mark.parametrize("pad_left", [False, True])
def test_forced_gather_with_everything_kept(kind, family, batches, pad_left, reduction):
    """VisionZip too: without a class token (LLaVA has one) and with nothing to merge it is the identity."""
    if (kind, reduction["name"]) == ("llava", "visionzip"):
        return
    batch = batches(pad_left=pad_left)
    real, backbone = batch.regions_BN != Region.PADDING, compress(family, ALL_GROUPS, keep_ratio=1.0, **reduction)
    result = backbone.run(batch, force_gather=True, pad_left=pad_left)
    assert torch.equal(result.rows.visible_BM, real)
    assert (backbone.logits(result)[real] - hf_logits(family, batch)[real]).abs().max() < 1e-5


def test_fastv_ranks_by_the_attention_of_the_mrope_decoder(tmp_path):
    qwen = qwen_family()
    batch = qwen_batch(qwen, qwen_records(tmp_path), pad_left=True)
    visible, positions = batch.regions_BN != Region.PADDING, qwen.positions(batch)
    qwen.model.set_attn_implementation("eager")
    full = qwen.decoder(
        inputs_embeds=qwen.embed(batch),
        attention_mask=visible.long(),
        position_ids=positions,
        output_attentions=True,
        use_cache=False,
    ).attentions
    qwen.model.set_attn_implementation("sdpa")
    row_B = torch.tensor([batch.rank_position_B[0], batch.rank_position_B[1], visible.shape[1] - 1])
    for layer in range(4):
        below = qwen.run_layers(qwen.embed(batch), visible, positions, stop=layer)
        row = row_attention(qwen, layer, below, visible, positions, row_B)
        expected = full[layer].mean(1)[torch.arange(3), row_B]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)
    assert row.std() > 0.01


@pytest.mark.parametrize("pictures", [1, 2], ids=["video", "video-and-image"])
def test_prompts_with_videos_are_the_backbone(pictures):
    """A video alone bit for bit; beside an image the tower runs once, transformers' twice."""
    onevision, video = onevision_family(), Video(tuple(noise(30, 44, seed) for seed in range(3)))
    given = inputs_of(onevision, "what moves?", [video, noise(20, 30)][:pictures])
    batch = batch_from_inputs(onevision, given["input_ids"], given["attention_mask"].bool(), given, None)
    expected = onevision.model(**given, use_cache=False).logits
    neutral = compress(onevision, ALL_GROUPS, name="fastv", keep_ratio=1.0)
    got = neutral.logits(neutral.run(batch))
    assert torch.equal(got, expected) if pictures == 1 else torch.allclose(got, expected, atol=1e-5)
