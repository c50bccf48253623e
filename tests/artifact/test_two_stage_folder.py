"""The folder that stage 2 leaves: whole without stage 1's, strict in both directions, loadable with plain peft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from subtoken_train.artifact.folder import SCHEMA_VERSION, read_adapter, read_config
from subtoken_train.engine.build import Stage2Config
from subtoken_train.families.lora import LoraSettings
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import made_adapter, make_batch, save_backbone
from tests.support.sampling import sampled

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "checkpoints" / "adapters").iterdir())
STAGE2 = Stage2Config("runs/first/adapter", LoraSettings(rank=2, alpha=4, dropout=0.0))


@pytest.fixture
def saved(tmp_path, tiny_family):
    return save_backbone(tiny_family, tmp_path / "backbone")


def write(folder, saved, stage2):
    lora, reducer = LoraSettings(rank=4, dropout=0.1), build_reducer("fastv", 0.25)
    training = {"name": "second", "steps": 5, "stage1": {"name": "first", "steps": 7}}
    return made_adapter(folder, saved, reducer, RoutingConfig(), lora, stage2, 0.2, **training)


@pytest.fixture
def written(tmp_path, saved):
    return write(tmp_path / "adapter", saved, STAGE2)


@pytest.mark.slow
@torch.no_grad()
def test_round_trip_gives_the_same_logits(written):
    folder, backbone = written
    config, reloaded, _ = read_adapter(folder)
    assert config.stage2 == STAGE2
    assert config.lora == LoraSettings(rank=4, dropout=0.1)
    batch = make_batch([(1, 8), (0, 5)])
    assert torch.equal(reloaded.logits(reloaded.run(batch)), backbone.logits(backbone.run(batch)))
    trained = {name for name, parameter in reloaded.named_parameters() if parameter.requires_grad}
    assert all(".output." in name or name.startswith("bank.") for name in trained)


@torch.no_grad()
def test_plain_peft_loads_either_lora_or_both(written):
    """As the model card says; the backbone without routers, so values are whole."""
    folder, backbone = written
    path, batch = backbone.family.model.config._name_or_path, make_batch([(0, 5)])
    base = AutoModelForImageTextToText.from_pretrained(path)
    model = PeftModel.from_pretrained(base, folder)
    model.load_adapter(str(folder), "output", subfolder="output")
    model.base_model.set_adapter(["default", "output"])
    ours = {name: tensor for name, tensor in backbone.family.model.state_dict().items() if "lora_" in name}
    theirs = {name: tensor for name, tensor in base.state_dict().items() if "lora_" in name}
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    both = model(input_ids=batch.input_ids_BN).logits  # no image: nothing is routed
    assert torch.allclose(both, backbone.logits(backbone.run(batch)), atol=1e-5)
    model.base_model.set_adapter(["default"])
    assert not torch.allclose(model(input_ids=batch.input_ids_BN).logits, both, atol=1e-2)


def test_the_folder_without_an_output_lora(tmp_path, saved):
    folder, _ = write(tmp_path / "adapter", saved, Stage2Config("runs/first/adapter"))
    assert not (folder / "output").exists()
    config, _, peft_model = read_adapter(folder)
    assert config.stage2 == Stage2Config("runs/first/adapter")
    assert list(peft_model.peft_config) == ["default"]
    card = (folder / "README.md").read_text()
    assert (
        "two stages: first the q/v LoRA, token-only (name first, steps 7); then, with it frozen, the routers." in card
    )
    assert "o_proj" not in card


def test_the_card_names_both_loras(written):
    card = (written[0] / "README.md").read_text()
    assert (
        "| LoRA on q and v | rank 4, alpha 32, dropout 0.1 |\n| LoRA on o_proj | rank 2, alpha 4, dropout 0.0 |" in card
    )
    assert "the routers and a LoRA on `o_proj`." in card
    assert 'set_adapter(["default", "output"])' in card
    assert "| training | name second, steps 5 |" in card


@pytest.mark.slow
def test_files_are_exact(written):
    folder, _ = written
    path = folder / "output" / "adapter_model.safetensors"
    tensors = load_file(path)
    assert len(tensors) == 8
    assert all("o_proj" in name for name in tensors)
    assert all("o_proj" not in name for name in load_file(folder / "adapter_model.safetensors"))
    save_file({**tensors, "stranger": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"output/adapter_model.safetensors .*1 not expected \['stranger'\]"):
        read_adapter(folder)
    shutil.rmtree(folder / "output")
    with pytest.raises(ValueError, match=r"output/adapter_config.json is missing"):
        read_adapter(folder)


def test_a_stray_output_lora(written):
    folder, _ = written
    path = folder / "subtoken_config.json"
    record = json.loads(path.read_text())
    record["stage2"]["output_lora"] = None
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"holds output/, but its subtoken_config.json names no output LoRA"):
        read_adapter(folder)


@pytest.mark.slow
def test_the_schema(written):
    """Version 2 says whether there was a second stage, 3 if the LoRA is merged; 4 has a reducer's own; 5, 6 more."""
    path = written[0] / "subtoken_config.json"
    record = json.loads(path.read_text())
    assert record["schema_version"] == SCHEMA_VERSION == 7
    own = {"stage": "embeds", "layer": 2, "ranking": "adapted", "merge_dropped": False}
    assert record["reducer"] == {"name": "fastv", "keep_ratio": 0.25, "round_up": False, "matches": None, **own}
    del record["merged"]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="merged is missing"):
        read_config(written[0])
    record["schema_version"] = 2
    path.write_text(json.dumps(record))
    assert read_config(written[0]).merged is False
    del record["stage2"]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="stage2 is missing"):
        read_config(written[0])
    path.write_text(json.dumps({**record, "schema_version": 1}))
    assert read_config(written[0]).stage2 is None


@sampled("folder", SHIPPED, every=3, ids=lambda path: path.name)
def test_shipped_folders_are_read_whatever_their_schema(folder):
    assert json.loads((folder / "subtoken_config.json").read_text())["schema_version"] <= SCHEMA_VERSION
    config, backbone, _ = read_adapter(folder)
    assert config.stage2 is None
    assert (backbone.bank is None) == (config.routing is None)
