"""Folders that are written whole: an old one is renamed, whatever is in it, and nothing is deleted."""

import os
from functools import partial
from pathlib import Path

import pytest

from subtoken_train.artifact.whole_folder import whole_folder
from tests.support.refusals import refuses
from tests.support.run_folders import die, kill_in, killed, no_room


def write(folder, text, overwrite=False):
    with whole_folder(folder, overwrite) as temporary:
        for name in ("adapter_model.safetensors", "subtoken_config.json"):
            (temporary / name).write_text(text)


def adapters(parent):
    """What every whole adapter below ``parent`` holds, by its name."""
    found = sorted(path.parent for path in parent.glob("*/subtoken_config.json"))
    return {folder.name: (folder / "adapter_model.safetensors").read_text() for folder in found}


def test_an_old_folder_keeps_all_its_files_under_the_next_free_name(tmp_path):
    write(tmp_path / "out", "first")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out.1").write_text("a file of this name")
    write(tmp_path / "out", "second", overwrite=True)
    write(tmp_path / "out", "third", overwrite=True)
    assert adapters(tmp_path) == {"out": "third", "out.2": "first", "out.3": "second"}
    assert (tmp_path / "out.2" / "notes.txt").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 4


def test_what_is_no_adapter_folder_is_refused(tmp_path):
    write(tmp_path / "out", "old")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    (tmp_path / "other").mkdir()
    for name, words in {
        "link": "is a symbolic link",
        "nowhere": "symbolic link",
        "other": "no subtoken_config",
    }.items():
        refuses(words, write, tmp_path / name, "new", overwrite=True)
    refuses("exists; choose another folder or pass --overwrite", write, tmp_path / "out", "new")
    assert adapters(tmp_path) == {"link": "old", "out": "old"}


def test_a_kill_at_any_step_leaves_the_old_adapter_and_perhaps_the_new_one(tmp_path):
    for number in range(1, 50):
        parent = tmp_path / str(number)
        parent.mkdir()
        write(parent / "out", "old")
        if not kill_in(number, partial(write, parent / "out", "new", overwrite=True)):
            break
        assert "old" in adapters(parent).values(), number
        write(parent / "out", "newest", overwrite=True)
        found = adapters(parent)
        assert (found["out"], len(list(parent.iterdir()))) == ("newest", len(found)), number
    assert adapters(parent) == {"out": "new", "out.1": "old"}
    assert number > 4


def test_a_kill_between_two_names_leaves_the_old_one_under_its_new_name(tmp_path):
    def dying():
        Path.rename = lambda path, target: (os.rename(path, target), die())
        write(tmp_path / "out", "new", overwrite=True)

    write(tmp_path / "out", "old")
    assert killed(dying)
    write(tmp_path / "out", "newest")
    assert adapters(tmp_path) == {"out": "newest", "out.1": "old"}
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_leaves_the_old_folder(tmp_path):
    write(tmp_path / "out", "old")
    with no_room(10_000), pytest.raises(OSError, match="File too large") as caught:
        write(tmp_path / "out", "x" * 10**5, overwrite=True)
    assert caught.value.filename == str(tmp_path / "out")
    assert adapters(tmp_path) == {"out": "old"}
    assert len(list(tmp_path.iterdir())) == 1
