"""Folders that are written whole: what is beside them stays, and what is in them that is not of their kind."""

import os
from functools import partial
from pathlib import Path

import pytest

from subtoken_train.artifact.whole_folder import whole_folder
from tests.support.faults import die, killed, no_room
from tests.support.run_folders import kill_in


def write(folder, text, overwrite=False):
    with whole_folder(folder, overwrite) as temporary:
        for name in ("adapter_model.safetensors", "subtoken_config.json"):
            (temporary / name).write_text(text)


def adapters(parent):
    """What every whole adapter below ``parent`` holds."""
    found = parent.glob("*/adapter_model.safetensors")
    return [path.read_text() for path in found if (path.parent / "subtoken_config.json").is_file()]


def test_neighbours_stay(tmp_path):
    for ending in (".partial", ".replaced"):
        (tmp_path / f"out{ending}").mkdir()
        (tmp_path / f"out{ending}" / "notes.txt").write_text("mine")
    write(tmp_path / "out", "old")
    write(tmp_path / "out", "new", overwrite=True)
    assert adapters(tmp_path) == ["new"]
    assert [path.read_text() for path in tmp_path.glob("out.*/notes.txt")] == ["mine", "mine"]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("name", ["notes.txt", "output/notes.txt", "images/a.png", "adapter_model.bin"])
def test_strangers_stay(tmp_path, name):
    write(tmp_path / "out", "old")
    (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(ValueError, match="out holds files that do not belong to an adapter folder"):
        write(tmp_path / "out", "new", overwrite=True)
    assert adapters(tmp_path) == ["old"]
    assert (tmp_path / "out" / name).read_text() == "mine"


def test_what_came_while_it_was_written_stays(tmp_path):
    def write_slowly():
        with whole_folder(tmp_path / "out", overwrite=True) as temporary:
            (temporary / "subtoken_config.json").write_text("new")
            (tmp_path / "out" / "notes.txt").write_text("mine")

    write(tmp_path / "out", "old")
    with pytest.raises(ValueError, match=r"do not belong to .* \(notes.txt\)"):
        write_slowly()
    assert adapters(tmp_path) == ["old"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_link_is_not_replaced(tmp_path):
    write(tmp_path / "out", "old")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    for name in ("link", "nowhere"):
        with pytest.raises(ValueError, match="is a symbolic link"):
            write(tmp_path / name, "new", overwrite=True)
    assert adapters(tmp_path / "out" / "..") == ["old", "old"]


def test_a_failed_write_leaves_no_folder(tmp_path):
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "deep" / "out", overwrite=False):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_kill_at_any_step_leaves_a_whole_adapter(tmp_path):
    for number in range(1, 50):
        parent = tmp_path / str(number)
        parent.mkdir()
        write(parent / "out", "old")
        if not kill_in(number, partial(write, parent / "out", "new", overwrite=True)):
            break
        assert set(adapters(parent)) & {"old", "new"}, number
        write(parent / "out", "newest", overwrite=True)
        assert (adapters(parent), len(list(parent.iterdir()))) == (["newest"], 1), number
    assert adapters(parent) == ["new"]
    assert number > 4


def test_a_kill_between_two_names_puts_the_old_one_back(tmp_path):
    def dying():
        Path.rename = lambda path, target: (os.rename(path, target), die())
        write(tmp_path / "out", "new", overwrite=True)

    write(tmp_path / "out", "old")
    assert killed(dying)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="exists; choose another folder or pass --overwrite"):
        write(tmp_path / "out", "newest")
    assert adapters(tmp_path) == ["old"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_leaves_the_old_folder(tmp_path):
    write(tmp_path / "out", "old")
    with no_room(10_000), pytest.raises(OSError, match="File too large") as caught:
        write(tmp_path / "out", "x" * 10**5, overwrite=True)
    assert caught.value.filename == str(tmp_path / "out")
    assert adapters(tmp_path) == ["old"]
    assert len(list(tmp_path.iterdir())) == 1
