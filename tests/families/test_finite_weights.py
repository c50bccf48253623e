"""NaN and infinity in a backbone's weights are said when it is loaded."""

from __future__ import annotations

import math

import pytest
import torch

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.backbone_files import check_finite_weights
from subtoken_train.families.load import load_family
from subtoken_train.inference.model import SubTokenModel
from tests.support.helpers import save_backbone
from tests.support.sampling import sampled
from tests.support.text_families import text_family

WORDS = r"the weights of backbone .* hold NaN or infinity in {} tensors, first {}; .* download it again, or choose"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@sampled("dtype", ["float32", "bfloat16", "float16"], every=3)
def test_one_number_of_millions_is_found(tmp_path, tiny_family, value, dtype):
    """In the last place of a late tensor, of the tower too; the first by name is said."""
    model = tiny_family.model
    names = [name for name, _ in model.named_parameters()]
    broken = next(n for n in names if "vision" in n and n.endswith("fc2.weight")), "lm_head.weight"
    with torch.no_grad():
        for name in broken:
            model.get_parameter(name).view(-1)[-1] = value
    save_backbone(tiny_family, tmp_path)
    with pytest.raises(ValueError, match=WORDS.format(2, min(broken, key=names.index))) as raised:
        load_family(BackboneConfig(str(tmp_path), dtype=dtype))
    assert len(str(raised.value)) <= 400
    with pytest.raises(ValueError, match=WORDS.format(2, ".*")):
        SubTokenModel(model, tiny_family.processor)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_quantised_weight_says_it_by_its_scales(tmp_path, quantization):
    pytest.importorskip("bitsandbytes")
    family = text_family(layers=2)
    save_backbone(family, tmp_path / "whole")
    load_family(BackboneConfig(str(tmp_path / "whole"), quantization=quantization))
    with torch.no_grad():
        family.decoder.layers[1].self_attn.q_proj.weight[3, 5] = math.nan
    save_backbone(family, tmp_path / "broken")
    with pytest.raises(ValueError, match=WORDS.format(1, r"model\.layers\.1\.self_attn\.q_proj\.weight")):
        load_family(BackboneConfig(str(tmp_path / "broken"), quantization=quantization))


def test_large_numbers_are_numbers():
    """Whose sum is none, in any dtype; and buffers may be infinite (a mask)."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        part = torch.nn.Linear(64, 64).to(dtype)
        part.weight.data.fill_(torch.finfo(dtype).max)
        part.register_buffer("mask", torch.full((4,), -math.inf))
        part.register_buffer("places", torch.arange(4))
        part.register_parameter("absent", torch.nn.Parameter(torch.empty(0)))
        check_finite_weights(part, "x")
    part.mask[0] = math.nan
    with pytest.raises(ValueError, match=WORDS.format(1, "mask")):
        check_finite_weights(part, "x")
