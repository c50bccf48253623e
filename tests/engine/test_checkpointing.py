"""Gradient checkpointing of a frozen backbone in evaluation mode, as in training: layers are really recomputed."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import compress, make_batch
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family
from tests.support.tiny.qwen import qwen_batch, qwen_family, qwen_records

SETTINGS = {
    "llava": {"name": "fastv", "keep_ratio": 0.25},
    "qwen2_5_vl": {"name": "fastv", "keep_ratio": 0.5},
    "llama": {"name": "quest", "keep_ratio": 0.5, "page_size": 4, "window": 4},
}


@pytest.fixture
def build(tiny_family, tmp_path):

    def made(name):
        if name == "llava":
            return tiny_family, make_batch([(1, 9), (1, 7)])
        if name == "llama":
            return text_family(), text_batch([(24, 8, 4), (16, 8, 4)])
        family = qwen_family()
        return family, qwen_batch(family, qwen_records(tmp_path))

    return made


@sampled("name", SETTINGS, every=3)
def test_layers_are_recomputed_though_the_backbone_is_in_evaluation_mode(build, name):
    family, batch = build(name)
    add_lora(family, LoraSettings(rank=4, dropout=0.0))
    backbone = compress(family, RoutingConfig(num_groups=8, kept_groups=2), **SETTINGS[name])
    assert not family.decoder.layers[0].training
    calls = []
    for layer in family.decoder.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: calls.append(torch.is_grad_enabled()))

    def gradients():
        calls.clear()
        backbone.zero_grad()
        result = backbone.run(batch)
        choices = dict(result.state.choices)
        loss = backbone.logits(result).logsumexp(-1).mean() + result.state.mean_balance()
        loss.backward()
        assert all(result.state.choices[layer] is first for layer, first in choices.items())  # no recomputed graph
        return {key: p.grad.clone() for key, p in backbone.named_parameters() if p.requires_grad}

    plain, layers = gradients(), family.shape.num_layers
    assert sum(calls) == layers
    enable_checkpointing(family, backbone.bank)
    assert not family.decoder.layers[0].mlp.training
    recomputed = gradients()
    assert sum(calls) == 2 * layers
    assert all(torch.equal(recomputed[key], gradient) for key, gradient in plain.items())
