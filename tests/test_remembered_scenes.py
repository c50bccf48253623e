"""benchmarks/remembered_scenes.py: training on remembered towers and scouts is training, to rounding."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.remembered_scenes import SceneMemory
from subtoken_train.cli.main import main
from subtoken_train.datasets.scene_files import write_scenes
from subtoken_train.engine.attention_rows import LayerAttention
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.llava.model import LlavaFamily
from subtoken_train.families.load import load_family
from tests.support.places import ROOT
from tests.support.sampling import sampled


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes") / "scenes"
    write_scenes(folder, train=12, dev=1, test=1)
    family = load_family(BackboneConfig(path=str(ROOT / "checkpoints/tiny-llava"), dtype="float32"))
    SceneMemory.write(folder.parent / "towers.pt", family, folder / "train.json")
    return folder


def fitted(scenes, out, recipe, *flags):
    argv = ["fit", "--config", recipe, "--data.train_file", str(scenes / "train.json"), "--output_dir", str(out)]
    argv += ["--trainer.max_steps", "5", "--data.batch_size", "4", "--model.optimizer.warmup_steps", "0", *flags]
    assert main(argv) == 0
    return {path.name: load_file(path) for path in (out / "adapter").glob("*.safetensors")}


@sampled(
    ("recipe", "flags", "scouts"),
    [
        ("tiny_fastv25_s16k4", ["--model.reducer.ranking", "frozen"], 3),  # 12 records in batches of 4: one epoch
        ("tiny_fastv25_s16k4", [], 5),
        ("tiny_visionzip25_s16k4_anchor", [], 0),
    ],
    every=6,
)
def test_a_run_is_the_same_and_looks_up_what_does_not_change(scenes, tmp_path, monkeypatch, recipe, flags, scouts):
    anew = fitted(scenes, tmp_path / "anew", recipe, *flags)
    memory, seen = SceneMemory(scenes.parent / "towers.pt"), []
    tower, first_init = LlavaFamily.visual_states, LayerAttention.__init__

    def looked(self, *args):
        seen.append("scout")
        first_init(self, *args)

    monkeypatch.setattr(LayerAttention, "__init__", looked)
    with memory.in_use():
        assert LlavaFamily.visual_states is not tower
        remembered = fitted(scenes, tmp_path / "remembered", recipe, *flags)
    assert LlavaFamily.visual_states is tower
    assert len(seen) == scouts
    assert remembered.keys() == anew.keys()
    for name, tensors in anew.items():
        for key, tensor in tensors.items():
            assert torch.allclose(remembered[name][key], tensor, atol=2e-5), key
