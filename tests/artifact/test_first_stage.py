"""What stage 2 may start from: a token-only adapter of the same backbone, reducer and LoRA settings, whole on disk."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from subtoken_train.artifact.first_stage import read_first_stage
from subtoken_train.artifact.folder import AdapterConfig, write_adapter
from subtoken_train.artifact.identity import identify
from subtoken_train.engine.build import build
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import layout_family, load_family
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import save_backbone

LORA = LoraSettings(rank=4, alpha=8, dropout=0.1)
REDUCER = build_reducer("fastv", keep_ratio=0.25)


@pytest.fixture
def source(tmp_path, tiny_family):
    return BackboneConfig(path=str(save_backbone(tiny_family, tmp_path / "backbone")))


def write(folder, source, routing=None):
    backbone, peft_model = build(source, LORA, REDUCER, routing)
    config = AdapterConfig(source, LORA, REDUCER, routing, identify(backbone.family, source))
    return write_adapter(folder, config, backbone, peft_model)


@pytest.fixture
def adapter(tmp_path, source):
    return write(tmp_path / "adapter", source)


@pytest.mark.parametrize("layout", [False, True])
def test_the_right_one(adapter, source, layout):
    """Its settings are read, and its tensors fit a loaded model as well as one on the meta device."""
    first = read_first_stage(adapter, REDUCER, None)
    assert first.config.lora == LORA
    assert read_first_stage(adapter, REDUCER, LORA) == first
    family = layout_family(source) if layout else load_family(source)
    tensors = first.tensors(family, source, add_lora(family, LORA))
    on_disk = load_file(adapter / "adapter_model.safetensors")
    assert tensors.keys() == on_disk.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in on_disk.items())


def test_the_digest_is_that_of_the_tensors(adapter):
    first = read_first_stage(adapter, REDUCER, None)
    before = first.digest()
    (adapter / "README.md").write_text("other words")
    assert first.digest() == before
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert first.digest() != before


@pytest.mark.parametrize(
    ("reducer", "words"),
    [
        (build_reducer("fastv", 0.125), r"reducer.keep_ratio 0.25 \(the recipe has 0.125\)"),
        (build_reducer("visionzip", 0.25), r"reducer.name fastv \(the recipe has visionzip\)"),
        (build_reducer("fastv", 0.25, stage="decoder"), r"reducer.stage embeds \(the recipe has decoder\)"),
        (build_reducer("fastv", 0.25, layer=4), r"reducer.layer 2 \(the recipe has 4\)"),
        (build_reducer("fastv", 0.25, round_up=True), r"reducer.round_up False \(the recipe has True\)"),
    ],
)
def test_another_reducer(adapter, reducer, words):
    with pytest.raises(ValueError, match=f"stage2.adapter .*adapter was trained with {words}"):
        read_first_stage(adapter, reducer, None)


def test_a_contradicting_lora(adapter):
    with pytest.raises(ValueError, match=r"lora.rank 4 \(the recipe has 16\), lora.alpha 8 \(the recipe has 32\)"):
        read_first_stage(adapter, REDUCER, LoraSettings(dropout=0.1))


@pytest.mark.parametrize("selector", ["linear", "value_norm"])
def test_a_routed_adapter(tmp_path, source, selector):
    folder = write(tmp_path / "routed", source, RoutingConfig(selector=selector, num_groups=8, kept_groups=2))
    with pytest.raises(ValueError, match=rf"routed already routes \({selector}, S=8, K=2\)"):
        read_first_stage(folder, REDUCER, None)


def test_no_folder_and_no_adapter_folder(tmp_path):
    with pytest.raises(ValueError, match=r"stage2.adapter .*absent does not exist; train the token-only recipe"):
        read_first_stage(tmp_path / "absent", REDUCER, None)
    with pytest.raises(ValueError, match="not an adapter folder"):
        read_first_stage(tmp_path, REDUCER, None)


def test_another_backbone(adapter, source, tmp_path):
    config = json.loads((tmp_path / "backbone" / "config.json").read_text())
    config["text_config"]["intermediate_size"] += 2
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    elsewhere = BackboneConfig(path=str(other))
    family = layout_family(elsewhere)
    with pytest.raises(ValueError, match=r"was trained on .*backbone' .*but the backbone is .*other"):
        read_first_stage(adapter, REDUCER, None).tensors(family, elsewhere, add_lora(family, LORA))


def test_tensors_of_another_rank(adapter, source):
    family = layout_family(source)
    with pytest.raises(ValueError, match=r"has shape \[4, 128\], expected \[6, 128\]"):
        read_first_stage(adapter, REDUCER, None).tensors(family, source, add_lora(family, LoraSettings(rank=6)))
