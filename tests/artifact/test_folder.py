"""The adapter folder is read strictly in both directions, and its LoRA loads with plain peft."""

from __future__ import annotations

import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from subtoken_train.artifact.folder import read_adapter, write_adapter
from subtoken_train.families.lora import LoraSettings
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import made_adapter, make_batch, save_backbone
from tests.support.sampling import sampled


@pytest.fixture
def saved(tmp_path, tiny_family):
    """The folder of a backbone."""
    return save_backbone(tiny_family, tmp_path / "backbone")


@pytest.fixture
def written(tmp_path, saved):
    """(folder, compressed backbone with random adapters) written to disk."""
    return write(tmp_path / "adapter", saved, RoutingConfig(num_groups=16, kept_groups=4))


def write(folder, saved, routing):
    reducer = build_reducer("fastv", keep_ratio=0.25)
    return made_adapter(folder, saved, reducer, routing, LoraSettings(rank=4, dropout=0.0), spread=0.2)


@torch.no_grad()
def test_round_trip_gives_the_same_logits(written):
    folder, backbone = written
    config, reloaded, _ = read_adapter(folder)
    assert config.routing == RoutingConfig(num_groups=16, kept_groups=4)
    batch = make_batch([(1, 8), (0, 5)])
    assert torch.equal(reloaded.logits(reloaded.run(batch)), backbone.logits(backbone.run(batch)))


@pytest.mark.slow
@torch.no_grad()
def test_gates_travel_with_the_routers(tmp_path, saved):
    routing = RoutingConfig(num_groups=64, kept_groups=16, budget="ranked", value_gate=True, score_prior="output_norm")
    folder, backbone = write(tmp_path / "adapter", saved, routing)
    config, reloaded, _ = read_adapter(folder)
    assert config.routing == routing
    betas = [gate.beta.item() for gate in reloaded.bank.gates]
    assert betas == [gate.beta.item() for gate in backbone.bank.gates]
    assert 0 not in betas
    batch = make_batch([(1, 8), (0, 5)])
    assert torch.equal(reloaded.logits(reloaded.run(batch)), backbone.logits(backbone.run(batch)))
    edit(folder, "router.safetensors", lambda tensors: tensors.pop("gates.2.beta"))
    with pytest.raises(ValueError, match=r"1 tensors missing \['gates.2.beta'\]"):
        read_adapter(folder)


@torch.no_grad()
def test_plain_peft_loads_the_lora(written):
    folder, backbone = written
    base = AutoModelForImageTextToText.from_pretrained(backbone.family.model.config._name_or_path)
    loaded = PeftModel.from_pretrained(base, folder)
    ours = {name: tensor for name, tensor in backbone.family.model.state_dict().items() if "lora_" in name}
    theirs = {name: tensor for name, tensor in base.state_dict().items() if "lora_" in name}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert loaded.peft_config["default"].r == 4


@sampled("routing", [None, RoutingConfig(selector="value_norm", num_groups=8, kept_groups=2)], every=2)
def test_arms_without_router_parameters_have_no_router_file(tmp_path, saved, routing):
    folder, _ = write(tmp_path / "adapter", saved, routing)
    assert not (folder / "router.safetensors").exists()
    assert read_adapter(folder)[0].routing == routing


def edit(folder, name, change):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)


def drop_first(tensors):
    del tensors[sorted(tensors)[0]]


def add_one(tensors):
    tensors["stranger"] = torch.ones(1)


def empty_first(tensors):
    tensors[sorted(tensors)[0]] = torch.empty(0)


@sampled("name", ["adapter_model.safetensors", "router.safetensors"], every=2)
@sampled(("change", "words"), [(drop_first, "missing"), (add_one, "stranger"), (empty_first, "shape")], every=3)
def test_tensor_files_are_exact(written, name, change, words):
    folder, _ = written
    edit(folder, name, change)
    with pytest.raises(ValueError, match=words):
        read_adapter(folder)


def test_stray_router_file(tmp_path, saved):
    folder, _ = write(tmp_path / "adapter", saved, None)
    save_file({"a": torch.ones(1)}, folder / "router.safetensors")
    with pytest.raises(ValueError, match="disagree"):
        read_adapter(folder)


def test_existing_folder_is_kept_without_overwrite(written):
    folder, backbone = written
    before = (folder / "subtoken_config.json").read_text()
    config, _, peft_model = read_adapter(folder)
    with pytest.raises(ValueError, match="--overwrite"):
        write_adapter(folder, config, backbone, peft_model)
    assert (folder / "subtoken_config.json").read_text() == before
    shutil.rmtree(folder)
    write_adapter(folder, config, backbone, peft_model)
    files = ("adapter_config.json", "adapter_model.safetensors", "router.safetensors", "subtoken_config.json")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", *files]
