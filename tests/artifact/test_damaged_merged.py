"""A merged folder is read strictly, and never from a pickle."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from subtoken_train.artifact.folder import read_adapter
from subtoken_train.artifact.identity import identify
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import layout_family
from tests.support.faults import Canary, put
from tests.support.helpers import save_backbone

SHIPPED = Path(__file__).resolve().parents[2] / "checkpoints" / "adapters" / "tiny_fastv25_s16k4"


@pytest.fixture
def merged(tmp_path, tiny_family) -> Path:
    """A folder that says that it is merged, over a random backbone."""
    made = save_backbone(tiny_family, tmp_path / "merged")
    shutil.copy(SHIPPED / "subtoken_config.json", made)
    for key, value in {"schema_version": 3, "stage2": None, "merged": True, "routing": None}.items():
        put(made, "subtoken_config.json", key, value)
    source = BackboneConfig(str(made))
    put(made, "subtoken_config.json", "identity.digest", identify(layout_family(source), source).digest)
    return made


def test_a_merged_folder_with_a_pickle_is_refused_unread(merged, tmp_path):
    torch.save({"weight": Canary(tmp_path / "ran")}, merged / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin may hold code and is not read"):
        read_adapter(merged)
    assert not (tmp_path / "ran").exists()


def test_a_merged_folder_needs_safetensors(merged):
    (merged / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no model.safetensors"):
        read_adapter(merged)


def test_a_merged_folder_holds_no_lora(merged):
    shutil.copy(SHIPPED / "adapter_config.json", merged)
    with pytest.raises(ValueError, match="the files disagree"):
        read_adapter(merged)


def test_merged_weights_are_whole_and_finite(merged):
    read_adapter(merged)
    tensors = load_file(merged / "model.safetensors")
    name = next(name for name in sorted(tensors) if "q_proj" in name)
    save_file({**tensors, name: tensors[name].fill_(float("nan"))}, merged / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"hold NaN or infinity in 1 tensors, first .*layers\.0.*q_proj\.weight"):
        read_adapter(merged)
    del tensors[name]
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="1 tensors are missing"):
        read_adapter(merged)


def test_merged_weights_are_no_integers(merged):
    tensors = load_file(merged / "model.safetensors")
    save_file({name: tensor.to(torch.int8) for name, tensor in tensors.items()}, merged / "model.safetensors")
    with pytest.raises(ValueError, match="is of type I8"):
        read_adapter(merged)
