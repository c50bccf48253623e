"""Stage 2: the q/v LoRA is frozen but works, the one on o_proj trains, and neither is anywhere else."""

import re

import pytest
import torch

from subtoken_train.engine.build import Stage2Config, assemble
from subtoken_train.families.lora import LoraSettings
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import make_batch

LORA = re.compile(r"model\.language_model\.layers\.(\d+)\.self_attn\.(\w+)\.lora_(A|B)\.(default|output)\.weight")
FIRST, OUTPUT = LoraSettings(rank=4, alpha=8, dropout=0.3), LoraSettings(rank=2, alpha=4, dropout=0.1)


def second_stage(family, output_lora=OUTPUT, routing=RoutingConfig(), dtype=None):  # noqa: B008
    """Stage 2 on a family, with random numbers where stage 1's tensors would be loaded."""
    if dtype is not None:
        family.model.to(dtype)
    torch.manual_seed(0)
    parts, peft_model = assemble(family, FIRST, build_reducer("fastv"), routing, Stage2Config("nowhere", output_lora))
    with torch.no_grad():
        for name, parameter in family.model.named_parameters():
            if "lora_B.default" in name:
                parameter.normal_(std=0.2)
    return parts, peft_model


def lora_of(family, trained):
    """(layer, module, A or B, adapter) of the LoRA tensors that train, or that do not."""
    return {
        LORA.fullmatch(name).groups()
        for name, parameter in family.model.named_parameters()
        if "lora_" in name and parameter.requires_grad == trained
    }


def test_only_the_output_projection_trains(tiny_family):
    second_stage(tiny_family)
    layers = [str(layer) for layer in range(4)]
    assert lora_of(tiny_family, True) == {(layer, "o_proj", part, "output") for layer in layers for part in "AB"}
    assert lora_of(tiny_family, False) == {
        (layer, module, part, "default") for layer in layers for module in ("q_proj", "v_proj") for part in "AB"
    }
    trained = [parameter for parameter in tiny_family.model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == 4 * 2 * 128 * 2


def test_without_an_output_lora_the_routers_alone_train(tiny_family):
    parts, _ = second_stage(tiny_family, output_lora=None)
    assert lora_of(tiny_family, True) == set()
    assert len(lora_of(tiny_family, False)) == 16
    assert {name.split(".")[0] for name, parameter in parts.named_parameters() if parameter.requires_grad} == {"bank"}


@torch.no_grad()
def test_both_adapters_work_at_once(tiny_family):
    """The logits move with either one, and a fresh output LoRA leaves stage 1's model as it is."""
    parts, peft_model = second_stage(tiny_family)
    batch = make_batch([(1, 8), (0, 5)])
    fresh = parts.logits(parts.run(batch))
    peft_model.base_model.set_adapter(["default"])
    assert torch.equal(parts.logits(parts.run(batch)), fresh)
    peft_model.base_model.set_adapter(["default", "output"])
    tiny_family.decoder.layers[1].self_attn.o_proj.lora_B["output"].weight.normal_(std=0.2)
    both = parts.logits(parts.run(batch))
    assert not torch.allclose(both, fresh, atol=1e-3)
    tiny_family.decoder.layers[1].self_attn.q_proj.lora_B["default"].weight.zero_()
    assert not torch.allclose(parts.logits(parts.run(batch)), both, atol=1e-3)


def test_the_output_lora_reads_the_routed_attention(tiny_family):
    """y + alpha / rank * B A y on what attention puts out, in training mode without its dropout."""
    second_stage(tiny_family, LoraSettings(rank=2, alpha=6, dropout=0.0))
    adapted = tiny_family.decoder.layers[2].self_attn.o_proj
    torch.nn.init.normal_(adapted.lora_B["output"].weight)
    attended = torch.randn(3, 128)
    update = attended @ adapted.lora_A["output"].weight.T @ adapted.lora_B["output"].weight.T
    assert torch.allclose(adapted.train()(attended), adapted.base_layer(attended) + 3.0 * update, atol=1e-4)


def test_the_frozen_lora_has_no_dropout(tiny_family):
    """Stage 1 is a fixed model: its own dropout of 0.3 is off even in training mode."""
    second_stage(tiny_family)
    attention = tiny_family.decoder.layers[0].self_attn.train()
    hidden = torch.randn(2, 128)
    assert torch.equal(attention.q_proj(hidden), attention.q_proj(hidden))
    assert not torch.equal(attention.o_proj.lora_dropout["output"](hidden), hidden)


def test_gradients_reach_the_output_lora_and_routers_only(tiny_family):
    parts, _ = second_stage(tiny_family)
    result = parts.run(make_batch([(1, 8)]))
    (parts.logits(result).square().mean() + result.state.mean_balance()).backward()
    for name, parameter in parts.named_parameters():
        assert (parameter.grad is not None) == (".output." in name or name.startswith("bank.")), name


@pytest.mark.parametrize(
    ("routing", "output_lora", "words"),
    [
        (None, OUTPUT, "set model.routing, or drop model.stage2"),
        (RoutingConfig(selector="value_norm"), None, "nothing to train: selector 'value_norm'"),
    ],
)
def test_wrong_settings_are_worded(tiny_family, routing, output_lora, words):
    with pytest.raises(ValueError, match=words):
        second_stage(tiny_family, output_lora, routing)


def test_a_router_free_selector_may_have_an_output_lora(tiny_family):
    second_stage(tiny_family, routing=RoutingConfig(selector="value_norm"))
    assert len(lora_of(tiny_family, True)) == 8
