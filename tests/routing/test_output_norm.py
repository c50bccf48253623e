"""The ``output_norm`` selector on the tiny model: which weights it reads, when, and what it refuses."""

import pytest
import torch
from torch import nn

from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.functional.group_norms import contribution_norms, head_grams
from subtoken_train.functional.masks import fixed_mask
from subtoken_train.ledger.kv_budget import KVShape
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank
from subtoken_train.routing.controls import OutputNorms
from tests.support.helpers import compress, gqa_family, make_batch, random_scores
from tests.support.sampling import sampled

BATCH = [(1, 9), (0, 6)]
READERS = [RoutingConfig(selector="output_norm"), RoutingConfig(score_prior="output_norm")]


@sampled("layout", ["contiguous", "per_head"], every=3)
@sampled("kv_heads", [4, 2, 1], every=3)
@torch.no_grad()
def test_chooses_by_each_layers_own_projection(layout, kv_heads):
    family = gqa_family(kv_heads)
    add_lora(family, LoraSettings(dropout=0.0))
    shape = family.shape
    backbone = compress(family, RoutingConfig(selector="output_norm", num_groups=8, kept_groups=3, layout=layout))
    values = []
    for block in family.decoder.layers:
        block.self_attn.v_proj.base_layer.register_forward_hook(lambda _, __, value: values.append(value))
    state = backbone.run(make_batch(BATCH)).state
    for layer, block in enumerate(family.decoder.layers):
        gram = head_grams(block.self_attn.o_proj.weight, shape.num_kv_heads, shape.head_dim, 8, layout)
        expected = fixed_mask(contribution_norms(values[layer], gram, 8, layout), 3)
        assert torch.equal(state.masks[layer][state.routed_BN], expected[state.routed_BN])


@torch.no_grad()
def test_differs_from_the_value_norm(tiny_family):
    batch = make_batch(BATCH)
    first, second = (
        compress(tiny_family, RoutingConfig(selector=name)).run(batch).state.masks[0]
        for name in ("output_norm", "value_norm")
    )
    assert not torch.equal(first, second)


@pytest.mark.parametrize("config", READERS, ids=["selector", "prior"])
def test_nothing_is_read_before_the_first_pass_and_nothing_is_saved(tiny_family, config):
    with torch.device("meta"):
        laid_out = RouterBank(config, 128, KVShape(1, 4, 32))
        laid_out.attach([nn.Linear(128, 128)], [nn.Linear(128, 128)])
    backbone = compress(tiny_family, config)
    before = set(backbone.bank.state_dict())
    with torch.inference_mode():
        backbone.run(make_batch(BATCH))
    assert set(backbone.bank.state_dict()) == before
    assert not any("gram" in name or "proj" in name for name in before)


@pytest.mark.parametrize("config", READERS, ids=["selector", "prior"])
def test_validation_first_and_training_after_it(tiny_family, config):
    """Lightning validates in inference mode; what it made there must serve a pass with gradients."""
    add_lora(tiny_family, LoraSettings(dropout=0.0))
    backbone = compress(tiny_family, config)
    with torch.inference_mode():
        checked = backbone.run(make_batch(BATCH)).state.masks
    result = backbone.train().run(make_batch(BATCH))
    assert all(torch.equal(mask, checked[layer]) for layer, mask in result.state.masks.items())
    backbone.logits(result).logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in backbone.parameters() if p.requires_grad)


def test_lora_on_the_projection_is_not_followed():
    base = nn.Linear(16, 16, bias=False)
    wrapped = nn.Module()
    wrapped.base_layer, wrapped.weight = base, nn.Parameter(torch.zeros(16, 16))
    config, shape = RoutingConfig(num_groups=4, kept_groups=1), KVShape(1, 2, 8)
    value = random_scores(0, 1, 3, 16)
    assert torch.equal(OutputNorms([wrapped], config, shape)(0, value), OutputNorms([base], config, shape)(0, value))


@pytest.mark.parametrize("config", READERS, ids=["selector", "prior"])
@pytest.mark.parametrize(("dtype", "words"), [(torch.uint8, "a weight of uint8"), (None, "no weight tensor")])
def test_a_quantised_projection_is_refused(config, dtype, words):
    projection = nn.Module()
    if dtype is not None:
        projection.weight = nn.Parameter(torch.zeros(64, 1, dtype=dtype), requires_grad=False)
    bank = RouterBank(config, 128, KVShape(1, 4, 32))
    with pytest.raises(ValueError, match=rf"output_norm needs .* but o_proj has {words}: leave it "):
        bank.attach([nn.Linear(128, 128)], [projection])
    RouterBank(RoutingConfig(), 128, KVShape(1, 4, 32)).attach([nn.Linear(128, 128)], [projection])
