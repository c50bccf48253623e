"""Trained tensors out of checkpoints and live models: whole, named, never empty."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.training.checkpoints import state_path
from subtoken_train.training.sharding import is_sharded
from subtoken_train.training.trained_tensors import (
    adapter_tensors,
    check_same_shapes,
    finished_parts,
    shapes_of,
    trained_tensors,
)


@pytest.mark.slow
def test_of_a_checkpoint_file(tiny_run, tmp_path):
    assert main(tiny_run("--trainer.max_steps=2", "--checkpoint.every_n_train_steps=2")) == 0
    tensors = trained_tensors(state_path(tmp_path / "run" / "checkpoints" / "step-2"))
    _, parts, _ = read_adapter(tmp_path / "run" / "adapter")
    written = {f"compressed.{name}": tensor for name, tensor in parts.named_parameters() if tensor.requires_grad}
    assert tensors.keys() == written.keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in tensors.items())


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        trained_tensors(tmp_path / "nowhere.ckpt")
    with pytest.raises(ValueError, match="not a complete DeepSpeed checkpoint"):
        trained_tensors(tmp_path)
    torch.save({"state_dict": {"a": torch.empty(0)}}, tmp_path / "empty.ckpt")
    with pytest.raises(ValueError, match="tensor a is empty"):
        trained_tensors(tmp_path / "empty.ckpt")


def test_a_gathered_adapter_is_written_without_the_backbones_weights(tiny_run):
    module = RecipeCLI(tiny_run()[1:]).model
    assert not is_sharded(module.parts)
    assert finished_parts(module) == (module.parts, module.peft_model)
    module.gathered = adapter_tensors(module.parts)
    parts, _ = finished_parts(module)
    for name, tensor in parts.named_parameters():
        assert tensor.is_meta == (name not in module.gathered)
        assert tensor.is_meta or torch.equal(tensor, module.gathered[name])
    assert {name for name, tensor in parts.named_parameters() if tensor.requires_grad} == module.gathered.keys()


def test_tensors_of_another_recipe():
    split = torch.zeros(0)
    split.ds_shape = torch.Size([3])  # as ZeRO-3 leaves it
    ours = shapes_of({"a": torch.zeros(2), "b": split})
    assert ours == {"a": [2], "b": [3]}
    check_same_shapes(ours, {"a": [2], "b": [3]})
    for theirs in ({"a": [2]}, {"a": [2], "b": [4]}, {"a": [2], "b": [3], "c": [2]}):
        words = r"the checkpoint does not fit this recipe: 1 trained tensors differ, first [bc] \(there .*resume with"
        with pytest.raises(ValueError, match=words):
            check_same_shapes(ours, theirs)
