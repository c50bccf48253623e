"""LoRA: exactly q and v of the language model train, in fp32, and nothing else."""

import re

import pytest
import torch

from subtoken_train.families.lora import LoraSettings, add_lora

TRAINED = re.compile(r"model\.language_model\.layers\.(\d+)\.self_attn\.(q_proj|v_proj)\.lora_(A|B)\.default\.weight")


def trainable(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_exactly_q_and_v_of_every_language_layer_train(tiny_family):
    add_lora(tiny_family, LoraSettings(rank=4))
    found = {TRAINED.fullmatch(name).groups() for name in trainable(tiny_family.model)}
    assert found == {(str(layer), name, part) for layer in range(4) for name in ("q_proj", "v_proj") for part in "AB"}
    assert sum(parameter.numel() for parameter in trainable(tiny_family.model).values()) == 4 * 2 * 2 * 128 * 4


def test_the_tower_has_no_adapter(tiny_family):
    tower = [name for name, _ in tiny_family.model.model.vision_tower.named_modules()]
    assert any(name.endswith("q_proj") for name in tower)
    add_lora(tiny_family, LoraSettings())
    assert [name for name, _ in tiny_family.model.model.vision_tower.named_modules()] == tower


def test_only_the_adapters_change_in_a_step(tiny_family):
    before = {name: tensor.clone() for name, tensor in tiny_family.model.state_dict().items()}
    peft_model = add_lora(tiny_family, LoraSettings(dropout=0.0))
    peft_model.train()
    tiny_family.decoder(inputs_embeds=torch.randn(1, 5, 128)).last_hidden_state.square().sum().backward()
    for parameter in trainable(tiny_family.model).values():
        assert parameter.grad is not None
    torch.optim.SGD(peft_model.parameters(), lr=1.0).step()
    after = {name.replace(".base_layer", ""): tensor for name, tensor in tiny_family.model.state_dict().items()}
    changed = {name for name in after if name not in before or not torch.equal(after[name], before[name])}
    assert {name for name in changed if "lora_" not in name} == set()
    assert any(after[name].any() for name in changed if "lora_B" in name)


def test_a_bf16_backbone_gets_fp32_adapters(tiny_family):
    tiny_family.model.bfloat16()
    add_lora(tiny_family, LoraSettings())
    for parameter in tiny_family.model.parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16)


def test_the_update_is_scaled_by_alpha_over_rank(tiny_family):
    add_lora(tiny_family, LoraSettings(rank=8, alpha=24, dropout=0.25))
    adapted = tiny_family.decoder.layers[1].self_attn.v_proj
    assert adapted.scaling["default"] == 3.0
    assert adapted.lora_dropout["default"].p == 0.25
    torch.nn.init.normal_(adapted.lora_B["default"].weight)
    hidden = torch.randn(2, 128)
    update = hidden @ adapted.lora_A["default"].weight.T @ adapted.lora_B["default"].weight.T
    assert torch.allclose(adapted.eval()(hidden), adapted.base_layer(hidden) + 3.0 * update, atol=1e-4)


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        (r"model\.language_model\.layers\.[01]\.self_attn\.(q_proj|v_proj)", 4),
        (r".*\.(q_proj|v_proj)", 16),  # the tower's too
    ],
)
def test_another_number_of_matches_is_worded(tiny_family, monkeypatch, pattern, matched):
    monkeypatch.setattr(type(tiny_family), "lora_pattern", pattern)
    with pytest.raises(ValueError, match=f"LoRA matched {matched} modules, expected 8"):
        add_lora(tiny_family, LoraSettings())


def test_no_match_at_all_names_the_pattern(tiny_family, monkeypatch):
    """Here with the module names of transformers 4."""
    monkeypatch.setattr(type(tiny_family), "lora_pattern", r"language_model\.model\.layers\.\d+\.self_attn\.q_proj")
    with pytest.raises(ValueError, match=r"language_model.*not found in the base model|LoRA matched 0 modules"):
        add_lora(tiny_family, LoraSettings())


@pytest.mark.parametrize("settings", [{"rank": 0}, {"dropout": 1.0}, {"dropout": -0.1}])
def test_wrong_settings_are_worded(settings):
    with pytest.raises(ValueError, match=r"lora (rank|dropout) is \S+; it must be "):
        LoraSettings(**settings)
