"""LoRA on exactly q and v, and quantised backbones: what is quantised, whose gradients are right, what fits."""

import re

import pytest
import torch
from torch import nn

from subtoken_train.artifact.folder import AdapterConfig, identify, read_adapter, write_adapter
from subtoken_train.engine.build import assemble, build
from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import layout_family, load_family
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.functional.quantized import dense_weight
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import make_batch, save_backbone
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.text_families import text_family
from tests.support.tiny.qwen import qwen_family

TRAINED = re.compile(r"model\.language_model\.layers\.(\d+)\.self_attn\.(q_proj|v_proj)\.lora_(A|B)\.default\.weight")


def training_in(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_exactly_q_and_v_of_every_language_layer_train(tiny_family):
    add_lora(tiny_family, LoraSettings(rank=4))
    found = {TRAINED.fullmatch(name).groups() for name in training_in(tiny_family.model)}
    assert found == {(str(layer), name, part) for layer in range(4) for name in ("q_proj", "v_proj") for part in "AB"}
    assert sum(parameter.numel() for parameter in training_in(tiny_family.model).values()) == 4 * 2 * 2 * 128 * 4


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
    refuses(f"LoRA matched {matched} modules, expected 8", add_lora, tiny_family, LoraSettings())


KINDS = ["nf4", "int8"]
FASTV, ROUTING = build_reducer("fastv", keep_ratio=0.25), RoutingConfig(num_groups=16, kept_groups=4)


@pytest.fixture
def folders(tmp_path, tiny_family):
    """A function from a family's name to the folder of a random tiny model of it."""
    pytest.importorskip("bitsandbytes")
    made = {"llava": lambda: tiny_family, "qwen2_5_vl": qwen_family, "llama": text_family}
    made["qwen2"] = lambda: text_family("qwen2")
    return lambda name: str(save_backbone(made[name](), tmp_path / name))


@sampled("kind", KINDS, every=4)
@sampled("name", ["llava", "qwen2_5_vl", "llama", "qwen2"], every=3)
def test_the_decoder_alone_is_quantised_and_the_identity_stays(folders, name, kind):
    path = folders(name)
    plain, config = BackboneConfig(path), BackboneConfig(path, quantization=kind)
    family = load_family(config)
    assert not family.model.training
    inside = {id(module) for module in family.decoder.modules() if isinstance(module, nn.Linear)}
    for module in family.model.modules():
        if isinstance(module, nn.Linear):
            expected = {"nf4": torch.uint8, "int8": torch.int8}[kind] if id(module) in inside else torch.float32
            assert module.weight.dtype == expected
    digests = {identify(made, plain).digest for made in (load_family(plain), layout_family(config), family)}
    assemble(family, LoraSettings(), build_reducer("none"), None)
    assert digests == {identify(family, config).digest}


def loss_and_gradients(parts, batch):
    parts.zero_grad()
    result = parts.run(batch)
    loss = parts.logits(result).float().logsumexp(-1).mean() + result.state.mean_balance()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in parts.named_parameters() if p.requires_grad}


def trainable(path, kind, dtype="float32", checkpointing=False):
    parts, _ = build(BackboneConfig(path, dtype=dtype, quantization=kind), LoraSettings(4, 8, 0.0), FASTV, ROUTING)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in parts.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    if checkpointing:
        enable_checkpointing(parts.family, parts.bank)
    return parts


def dequantised(parts, path):
    """The unquantised model with the values that the quantised one stands for, and the same adapters."""
    plain = trainable(path, "none")
    sources = dict(parts.named_modules())
    with torch.no_grad():
        for name, module in plain.named_modules():
            if isinstance(module, nn.Linear) and sources[name].weight.dtype in (torch.uint8, torch.int8):
                module.weight.copy_(dense_weight(sources[name], torch.float32))
    return plain


@sampled(("kind", "tolerance"), [("nf4", 1e-3), ("int8", 6e-2)], every=2)
def test_gradients_are_those_of_the_dequantised_weights(folders, kind, tolerance):
    """The scout's pass without gradient comes first; int8 products round their inputs as well."""
    path, batch = folders("llava"), make_batch([(1, 12), (1, 9)])
    parts = trainable(path, kind)
    loss, gradients = loss_and_gradients(parts, batch)
    expected_loss, expected = loss_and_gradients(dequantised(parts, path), batch)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    for name in expected:
        if "lora" in name:
            difference = (gradients[name] - expected[name]).norm() / expected[name].norm()
            assert difference < 10 * tolerance, (name, difference)


@sampled("kind", KINDS, every=2)
@sampled("dtype", ["float32", "bfloat16"], every=2)
def test_checkpointing_changes_nothing(folders, kind, dtype):
    path, batch = folders("llava"), make_batch([(1, 12), (1, 9)])
    plain, gradients = loss_and_gradients(trainable(path, kind, dtype), batch)
    again, recomputed = loss_and_gradients(trainable(path, kind, dtype, checkpointing=True), batch)
    assert plain == again
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in gradients.items())
    assert all(gradient.abs().sum() > 0 for name, gradient in gradients.items() if "lora_" in name)


def test_an_8_bit_layer_keeps_no_input_for_its_frozen_weight(folders):
    layer = load_family(BackboneConfig(folders("llama"), quantization="int8")).decoder.layers[1].mlp.gate_proj
    inputs = torch.randn(2, 7, 64, requires_grad=True)
    output = layer(inputs)
    assert not [value for value in vars(output.grad_fn).values() if isinstance(value, torch.Tensor)]
    assert not output.grad_fn.saved_tensors
    output.backward(torch.ones_like(output))
    assert torch.allclose(inputs.grad, torch.ones(2, 7, 96) @ dense_weight(layer, torch.float32), atol=1e-5)


@sampled(("trained", "served"), [("nf4", "none"), ("none", "nf4"), ("int8", "nf4")], every=3)
@torch.no_grad()
def test_adapters_fit_a_backbone_however_it_is_quantised(folders, tmp_path, trained, served):
    source, lora = BackboneConfig(folders("llava"), quantization=trained), LoraSettings(4, 8, 0.0)
    backbone, peft_model = build(source, lora, FASTV, ROUTING)
    config = AdapterConfig(source, lora, FASTV, ROUTING, identify(backbone.family, source), {"name": "test"})
    write_adapter(tmp_path / "adapter", config, backbone, peft_model)
    written, reloaded, _ = read_adapter(tmp_path / "adapter", BackboneConfig(source.path, quantization=served))
    assert written.backbone.quantization == trained
    ours, theirs = ({n: p for n, p in each.named_parameters() if p.requires_grad} for each in (backbone, reloaded))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    batch = make_batch([(1, 8)])
    logits = [parts.eval().logits(parts.run(batch)) for parts in (backbone, reloaded)]
    similarity = nn.functional.cosine_similarity(logits[0].flatten(), logits[1].flatten(), dim=0)
    assert similarity > 0.7  # other weights choose some other groups; unrelated logits would be near 0
