"""Checkpoint folders on disk: what counts as whole, and what every interruption leaves."""

import json
import shutil

import pytest

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
