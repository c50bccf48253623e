"""Reducers and routers on Qwen2.5-VL and LLaVA-OneVision: neutral settings are the backbone, a batch is its samples."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.types import Region
from tests.support.helpers import ALL_GROUPS, REDUCTIONS, ROUTED, compress
from tests.support.sampling import sampled
from tests.support.tiny.llava_onevision import onevision_family, onevision_records
from tests.support.tiny.qwen import qwen_batch, qwen_family, qwen_records

KINDS = {"qwen": (qwen_family, qwen_records), "onevision": (onevision_family, onevision_records)}
KEPT = {"qwen": [3, 7, 0], "onevision": [12, 5, 0]}
"""Visual tokens of each record that stay at a keep ratio of 0.25.

Of OneVision's 51 tokens 12 stay; of two pictures of ten 5 together, whether they are ranked together or share them out.
"""


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def family(kind):
    return KINDS[kind][0]()


@pytest.fixture
def records(kind, tmp_path):
    return KINDS[kind][1](tmp_path)


def qwen_logits(family, batch):
    """Transformers' own forward, which makes its mRoPE ids itself from the token types."""
    return family.model(
        input_ids=batch.input_ids_BN,
        attention_mask=(batch.regions_BN != Region.PADDING).long(),
        pixel_values=batch.pixel_values,
        image_grid_thw=batch.image_grid_I3,
        mm_token_type_ids=(batch.input_ids_BN == family.image_token_id).int(),
        use_cache=False,
    ).logits


def onevision_logits(family, batch):
    shown = {}
    if batch.pixel_values is not None:
        shown = family.given_images(batch.pixel_values, batch.image_grid_I3, batch.input_ids_BN)
        shown["batch_num_images"] = batch.images_per_sample_B[batch.images_per_sample_B > 0]
    visible_BN = (batch.regions_BN != Region.PADDING).long()
    position_BN = (visible_BN.cumsum(-1) - 1).clamp(min=0)
    return family.model(
        input_ids=batch.input_ids_BN, attention_mask=visible_BN, position_ids=position_BN, use_cache=False, **shown
    ).logits


def hf_logits(family, batch):
    return (qwen_logits if family.name == "qwen2_5_vl" else onevision_logits)(family, batch)


@pytest.mark.parametrize("reducer", ["fastv", "visionzip"])
@pytest.mark.parametrize("pad_left", [False, True])
@torch.no_grad()
def test_neutral_settings_are_the_backbone_bit_for_bit(family, records, pad_left, reducer):
    batch = qwen_batch(family, records, pad_left)
    expected = hf_logits(family, batch)
    add_lora(family, LoraSettings(dropout=0.0))
    neutral = compress(family, ALL_GROUPS, name=reducer, keep_ratio=1.0)
    got = neutral.logits(neutral.run(batch))
    real = batch.regions_BN != Region.PADDING
    assert torch.equal(got[real], expected[real])


@torch.no_grad()
def test_a_text_only_batch_is_the_backbone_bit_for_bit(family, records):
    batch = qwen_batch(family, records[2:])
    neutral = compress(family, ALL_GROUPS, name="visionzip", keep_ratio=0.25)
    assert torch.equal(neutral.logits(neutral.run(batch)), hf_logits(family, batch))


@sampled(("kind", "kv_heads"), [("qwen", 1), ("qwen", 2), ("qwen", 4), ("onevision", None)], every=4)
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: "-".join(r.values()))
@pytest.mark.parametrize("pad_left", [False, True])
@torch.no_grad()
def test_forced_gather_with_everything_kept(records, pad_left, reduction, kind, kv_heads):
    """VisionZip too: without a class token and with nothing to merge it is the identity."""
    family = onevision_family() if kv_heads is None else qwen_family(kv_heads=kv_heads)
    batch = qwen_batch(family, records, pad_left)
    backbone = compress(family, ALL_GROUPS, keep_ratio=1.0, **reduction)
    result = backbone.run(batch, force_gather=True, pad_left=pad_left)
    real = batch.regions_BN != Region.PADDING
    assert torch.equal(result.rows.visible_BM, real)
    assert (backbone.logits(result)[real] - hf_logits(family, batch)[real]).abs().max() < 1e-5


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: "-".join(r.values()))
@torch.no_grad()
def test_a_batch_equals_its_samples_on_either_side(kind, family, records, reduction):
    backbone = compress(family, ROUTED, keep_ratio=0.25, **reduction)
    alone = [qwen_batch(family, [record]) for record in records]
    expected = [backbone.logits(backbone.run(batch))[0] for batch in alone]
    assert [len(rows) for rows in expected] == [
        int((batch.regions_BN != Region.VISUAL).sum()) + count for batch, count in zip(alone, KEPT[kind], strict=True)
    ]
    for pad_left in (False, True):
        result = backbone.run(qwen_batch(family, records, pad_left), pad_left=pad_left)
        logits = backbone.logits(result)
        for sample, rows in enumerate(expected):
            torch.testing.assert_close(logits[sample][result.rows.visible_BM[sample]], rows, rtol=1e-4, atol=1e-4)
