"""Checkpoint folders on disk: what counts as whole, and what every interruption leaves."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.training import checkpoints
from subtoken_train.training.checkpoints import (
    Marker,
    begin,
    complete,
    incomplete,
    keep_newest,
    newest_complete,
    seal,
)
from subtoken_train.training.run_folder import new_marker, write_run_marker
from subtoken_train.training.trained_tensors import check_resumable, trained_shapes
from tests.support.toy_fit import Toy


def written(folder, step, content="state"):
    partial = begin(folder, step)
    (partial / "state.ckpt").write_text(content)
    return seal(partial, Marker(step, 2, "DDPStrategy", {"a.weight": [2, 3]}))


def test_the_newest_whole_one_counts_by_number_not_by_name(tmp_path):
    assert newest_complete(tmp_path / "none") is None
    for step in (10, 9, 100):
        written(tmp_path, step)
    assert [folder.name for folder in complete(tmp_path)] == ["step-9", "step-10", "step-100"]
    assert newest_complete(tmp_path) == tmp_path / "step-100"
    assert checkpoints.state_path(tmp_path / "step-100").read_text() == "state"
    assert checkpoints.read_marker(tmp_path / "step-10") == Marker(10, 2, "DDPStrategy", {"a.weight": [2, 3]})


def test_what_is_not_whole_is_ignored_and_named(tmp_path):
    written(tmp_path, 1)
    begin(tmp_path, 3)
    (written(tmp_path, 2) / "COMPLETE").unlink()
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-4.partial")  # marked, not renamed
    (tmp_path / "step-x").mkdir()
    (tmp_path / "last.ckpt").write_text("")
    assert newest_complete(tmp_path) == tmp_path / "step-1"
    assert [folder.name for folder in incomplete(tmp_path)] == ["step-2", "step-3.partial", "step-4.partial"]
    for name in ("step-2", "step-4.partial", "absent"):
        with pytest.raises(ValueError, match="not a complete checkpoint"):
            checkpoints.state_path(tmp_path / name)


def test_a_half_written_one_is_written_anew(tmp_path):
    (begin(tmp_path, 1) / "old").write_text("")
    (tmp_path / "step-1").mkdir()  # its marker is gone
    folder = written(tmp_path, 1)
    assert sorted(item.name for item in folder.iterdir()) == ["COMPLETE", "state.ckpt"]


def test_folders_of_shards(tmp_path):
    partial = begin(tmp_path, 1)
    (partial / "state.ckpt/checkpoint").mkdir(parents=True)
    (partial / "state.ckpt/checkpoint/rank0.pt").write_text("part")
    folder = seal(partial, Marker(1, 2, "DeepSpeedStrategy", {}))
    assert (checkpoints.state_path(folder) / "checkpoint/rank0.pt").read_text() == "part"


def test_older_ones_and_rubbish_go(tmp_path):
    for step in range(1, 5):
        written(tmp_path, step)
    begin(tmp_path, 9)
    (tmp_path / "mine").mkdir()
    keep_newest(tmp_path, 2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["mine", "step-3", "step-4"]


def test_a_removal_that_is_cut_short_leaves_no_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        written(tmp_path, step)
    monkeypatch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        keep_newest(tmp_path, 1)
    assert complete(tmp_path) == [tmp_path / "step-2"]


@pytest.mark.parametrize("moment", ["flush", "mark", "rename"])
def test_an_interrupted_write_leaves_the_previous_one(tmp_path, monkeypatch, moment):
    written(tmp_path, 1)

    def die(*args, **kwargs):
        raise OSError(28, "No space left on device")

    target = {"flush": (checkpoints, "flush"), "mark": (json, "dumps"), "rename": (type(tmp_path), "rename")}[moment]
    monkeypatch.setattr(*target, die)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path, 2)
    assert newest_complete(tmp_path) == tmp_path / "step-1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"schema_version": 2, "anything": 1}', r"written in layout 2; this version of subtoken_train reads up to 1"),
        ('{"schema_version": 1, "step": 1}', "cannot be read"),
        ('{"schema_v', "cannot be read"),
        ("[1]", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_markers_of_other_versions(tmp_path, content, message):
    folder = written(tmp_path, 1)
    (folder / "COMPLETE").write_text(content)
    with pytest.raises(ValueError, match=message):
        checkpoints.state_path(folder)


def resumable(folder, strategy="DDPStrategy", shards=False):
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
    check_resumable(resumable(tmp_path, there), trainer(here), trained_shapes(Toy()))


def test_what_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="written by DeepSpeedStrategy and cannot be read by DDPStrategy"):
        check_resumable(resumable(tmp_path / "a", "DeepSpeedStrategy"), trainer("DDPStrategy"), trained_shapes(Toy()))
    with pytest.raises(ValueError, match=r"holds the parts of 2 process\(es\), this run has 4"):
        check_resumable(resumable(tmp_path / "b", "Z", shards=True), trainer("Z", 4), trained_shapes(Toy()))
    with pytest.raises(ValueError, match=r"2 trained tensors differ, first layer.bias \(there \[4\], here \[5\]\)"):
        check_resumable(resumable(tmp_path / "c"), trainer("DDPStrategy"), trained_shapes(Toy(width=5)))


def test_shapes_under_zero_3():
    module = Toy()
    module.layer.weight.ds_shape = (7, 9)
    assert trained_shapes(module) == {"layer.weight": [7, 9], "layer.bias": [4]}


def test_a_requeued_job_resumes_also_where_its_command_says_overwrite(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    argv = ["--config", "tiny_fastv25_s16k4", "--output_dir", str(tmp_path), "--overwrite"]
    resumable(tmp_path / "checkpoints")
    assert RecipeCLI(argv).replaces
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    write_run_marker(tmp_path, new_marker())
    cli = RecipeCLI(argv)
    assert (cli.config.resume, cli.config.overwrite, cli.replaces) == (True, False, False)
