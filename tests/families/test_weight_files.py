"""Weights by the headers of their files: whole numbers are no weights unless a configuration says so."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import check_weights, family_class
from subtoken_train.resources import resource


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64])
def test_weights_of_whole_numbers_are_refused(tmp_path, dtype):
    folder = tmp_path / "tiny-llama"
    shutil.copytree(resource("checkpoints/tiny-llama"), folder)
    config = BackboneConfig(str(folder))
    check_weights(family_class(config), config)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(dtype)}, folder / "model.safetensors")
    words = f"{name} is of type {str(dtype).removeprefix('torch.')}, but its config.json names no quantisation"
    with pytest.raises(ValueError, match=words):
        check_weights(family_class(config), config)
    content = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in content
