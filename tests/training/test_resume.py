"""Which runs may go on from a checkpoint, found out from its marker alone."""

from types import SimpleNamespace

import pytest
import torch

from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.training.checkpoints import Marker, begin, seal
from subtoken_train.training.run_checkpoints import trained_shapes
from subtoken_train.training.run_folder import new_marker, write_run_marker
from subtoken_train.training.trained_tensors import check_resumable
from tests.support.toy_fit import Toy


def written(folder, strategy="DDPStrategy", shards=False):
    partial = begin(folder, 1)
    if shards:
        (partial / "state.ckpt").mkdir()
    else:
        parts = {
            "loops": {},
            "optimizer_states": [],
            "lr_schedulers": [],
            "epoch": 0,
            "global_step": 1,
            "random_state": [],
        }
        torch.save({"state_dict": Toy().layer.state_dict(prefix="layer."), **parts}, partial / "state.ckpt")
    return seal(partial, Marker(1, 2, strategy, trained_shapes(Toy())))


def trainer(strategy, world_size=1):
    return SimpleNamespace(strategy=type(strategy, (), {})(), world_size=world_size)


@pytest.mark.parametrize(("here", "there"), [("SingleDeviceStrategy", "DDPStrategy"), ("X", "X")])
def test_strategies_that_read_each_other(tmp_path, here, there):
    check_resumable(written(tmp_path, there), trainer(here), trained_shapes(Toy()))


def test_what_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="written by DeepSpeedStrategy and cannot be read by DDPStrategy"):
        check_resumable(written(tmp_path / "a", "DeepSpeedStrategy"), trainer("DDPStrategy"), trained_shapes(Toy()))
    with pytest.raises(ValueError, match=r"holds the parts of 2 process\(es\), this run has 4"):
        check_resumable(written(tmp_path / "b", "Z", shards=True), trainer("Z", 4), trained_shapes(Toy()))
    with pytest.raises(ValueError, match=r"2 trained tensors differ, first layer.bias \(there \[4\], here \[5\]\)"):
        check_resumable(written(tmp_path / "c"), trainer("DDPStrategy"), trained_shapes(Toy(width=5)))


def test_shapes_under_zero_3():
    module = Toy()
    module.layer.weight.ds_shape = (7, 9)
    assert trained_shapes(module) == {"layer.weight": [7, 9], "layer.bias": [4]}


def test_a_requeued_job_resumes_also_where_its_command_says_overwrite(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    argv = ["--config", "tiny_fastv25_s16k4", "--output_dir", str(tmp_path), "--overwrite"]
    written(tmp_path / "checkpoints")
    assert RecipeCLI(argv).replaces
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    write_run_marker(tmp_path, new_marker())
    cli = RecipeCLI(argv)
    assert (cli.config.resume, cli.config.overwrite, cli.replaces) == (True, False, False)
