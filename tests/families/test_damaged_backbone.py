"""A backbone's folder is data: nothing in it is run, and what is broken is worded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import layout_family, load_family
from tests.support.damage import Canary, put
from tests.support.helpers import save_backbone


@pytest.fixture
def backbone(tmp_path, tiny_family) -> Path:
    return save_backbone(tiny_family, tmp_path / "backbone")


def test_a_pickled_backbone_runs_no_code(backbone, tmp_path):
    (backbone / "model.safetensors").unlink()
    torch.save({"weight": Canary(tmp_path / "ran")}, backbone / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"the weights of backbone .* cannot be read"):
        load_family(BackboneConfig(str(backbone)))
    assert not (tmp_path / "ran").exists()


def test_remote_code_is_never_asked_for(backbone, tmp_path):
    (backbone / "code.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()")
    put(backbone, "config.json", "auto_map", {"AutoConfig": "code.Config", "AutoModelForImageTextToText": "code.Model"})
    load_family(BackboneConfig(str(backbone)))
    put(backbone, "config.json", "model_type", "own")
    with pytest.raises(ValueError, match=r"configuration of backbone .* cannot be used"):
        layout_family(BackboneConfig(str(backbone)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", "[" * 99_999, "nested deeper"),
        ("config.json", "[]", "must be a group of keys"),
        ("config.json", '{"model_type": "llama", "hidden_size": "wide"}', "cannot be used"),
        ("config.json", '{"model_type": "llama", "num_hidden_layers": 100000000}', "must be 0 to 10,000"),
        ("config.json", f'{{"model_type": "llama", "hidden_size": {10**400}}}', "a number of many digits"),
        ("config.json", '{"model_type": []}', "cannot be used"),
        ("config.json", '{"model_type": 5}', "cannot be used|unknown backbone family"),
        ("adapter_config.json", "{}", "is a LoRA of peft"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../x.safetensors"}}', "also names a file"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "x.safetensors"}}', "is incomplete"),
        ("model.safetensors.index.json", '{"weight_map": 3}', "names no weights"),
        ("model.safetensors", "{}", "the weights of backbone"),
        ("tokenizer.json", "[1", "tokenizer or processor"),
        ("tokenizer.json", "\udcff", "a text that is not UTF-8"),
        ("processor_config.json", "[1", "invalid JSON"),
    ],
)
def test_damaged_backbones(backbone, file, content, words):
    (backbone / file).write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=words) as raised:
        load_family(BackboneConfig(str(backbone)))
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(("key", "value"), [("head_dim", -1), ("num_attention_heads", 0), ("head_dim", [])])
def test_values_that_fit_no_model_are_worded(backbone, key, value):
    put(backbone, "config.json", "text_config", {"model_type": "llama", "hidden_size": 64, key: value})
    with pytest.raises(ValueError, match=r"^the configuration of backbone .* cannot be (used|read): ") as raised:
        layout_family(BackboneConfig(str(backbone)))
    assert len(str(raised.value)) < 500
