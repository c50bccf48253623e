"""Files and folders are whole or not there: on a full disk, after a kill, and beside other writers."""

import errno
import fcntl
import os
import re
from pathlib import Path

import pytest
import torch
from filelock import Timeout
from safetensors.torch import save_file

import subtoken_train
from subtoken_train import outputs
from subtoken_train.errors import SubTokenWarning
from tests.support.refusals import refuses
from tests.support.run_folders import die, killed, no_room

BIG = {"a": torch.zeros(100_000)}


def names(folder):
    return sorted(os.listdir(folder))


def save(path, content="new"):
    with outputs.whole_file(path) as temporary:
        temporary.write_text(content)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: outputs.write_whole(path, b"x" * 10**5),
        lambda path: outputs.append_whole(path, "x" * 10**5),
        lambda path: _with(outputs.whole_file(path), lambda temporary: save_file(BIG, temporary)),
        lambda path: _with(outputs.whole_file(path), lambda temporary: temporary.write_text("x" * 10**5)),
    ],
)
def test_a_full_disk_names_the_file_and_leaves_what_was_there(tmp_path, write):
    path = tmp_path / "a.file"
    path.write_text("old")
    with no_room(10_000), pytest.raises(OSError, match="File too large") as caught:
        write(path)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.file"]


def _with(manager, action):
    with manager as entered:
        action(entered)


def test_a_full_disk_leaves_no_new_folder(tmp_path):
    with no_room(10_000), pytest.raises(OSError, match="File too large") as caught:
        _with(outputs.new_folder(tmp_path / "new" / "out"), lambda partial: (partial / "x").write_text("x" * 10**5))
    assert caught.value.filename == str(tmp_path / "new" / "out")
    assert names(tmp_path) == []


def test_every_librarys_full_disk_is_one_error_and_others_stay_what_they_are(tmp_path):
    of_rust = Exception("No space left on device (os error 28)")
    for error, number in ((of_rust, 28), (OSError(errno.ENOSPC, "x"), 28), (OSError(errno.EIO, "x"), errno.EIO)):
        with pytest.raises(OSError, match=str(tmp_path)) as caught, outputs.room_for(tmp_path / "a"):
            raise error
        assert caught.value.errno == number
    for error in (RuntimeError("(os error 2)"), ValueError("x"), OSError(errno.ENOSPC, "x", "/elsewhere")):
        with pytest.raises(type(error)) as caught, outputs.room_for(tmp_path / "a"):
            raise error
        assert caught.value is error


def test_what_a_killed_writer_left_goes_with_the_next_write_to_the_same_file(tmp_path):
    path = tmp_path / "a.file"
    path.write_text("old")

    def dying(target):
        with outputs.whole_file(target) as temporary:
            temporary.write_text("half")
            (temporary.parent / ".tmpX1y2Z3").write_text("a library's own")
            die()

    assert killed(lambda: dying(path))
    assert killed(lambda: dying(tmp_path / "b.file"))
    assert path.read_text() == "old"
    assert len(names(tmp_path)) == 3
    save(path)
    assert path.read_text() == "new"
    assert [name.partition("-")[0] for name in names(tmp_path)] == [".b.file.subtoken", "a.file"]
    save(tmp_path / "b.file")
    assert names(tmp_path) == ["a.file", "b.file"]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_came_in_the_meantime_stays(tmp_path, monkeypatch, links):
    """Of two writers that found the place free, the second is told."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    path = tmp_path / "a.file"

    def second():
        with outputs.whole_file(path, overwrite=False) as temporary:
            temporary.write_text("second")
            outputs.write_whole(path, "first", overwrite=False)

    refuses(f"{path} came while this command ran, so it stays", second)
    assert path.read_text() == "first"
    assert names(tmp_path) == ["a.file"]


@pytest.mark.parametrize(("letter", "size"), [("a", 230), ("é", 240), ("a", 250), ("é", 254)])
def test_names_of_every_length_that_the_system_takes_are_written(tmp_path, letter, size):
    path, other = (tmp_path / (letter * (size // len(letter.encode()) - 1) + end) for end in "xy")

    def dying(target):
        with outputs.whole_file(target) as temporary:
            temporary.write_text("half")
            die()

    assert killed(lambda: dying(path))
    outputs.check_new([other], overwrite=False)
    save(other)
    assert len(names(tmp_path)) == 2, "another file's stage stays"
    save(path)
    assert names(tmp_path) == [path.name, other.name]
    with outputs.new_folder(tmp_path / "new" / (letter * (size // len(letter.encode())))) as folder:
        (folder / "x").write_text("new")


def test_what_cannot_be_written_is_said_before_the_work(tmp_path):
    (tmp_path / "a.file").write_text("mine")
    through = "Not a directory: '.*/a.file/b'"
    for path, words in ((tmp_path / ("n" * 256), "File name too long"), (tmp_path / "a.file" / "b", through)):
        for check in (lambda path: outputs.check_new([path], overwrite=True), outputs.check_place):
            with pytest.raises(OSError, match=words) as caught:
                check(path)
            assert str(path).startswith(caught.value.filename)
    outputs.check_place(tmp_path / "new" / "folder" / "file")
    assert names(tmp_path) == ["a.file"]


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_said_and_no_obstacle(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
    if number != errno.ENOSYS:  # which filelock itself makes up for, by a file that is there or not
        with pytest.warns(SubTokenWarning, match="lies on a file system without locks; it continues without one"):
            outputs.take_lock(tmp_path / ".lock", 0).release()
        with pytest.warns(SubTokenWarning, match="without locks"), outputs.locked(tmp_path / ".lock"):
            save(tmp_path / "a.file")
    save(tmp_path / "a.file", "again")
    assert (tmp_path / "a.file").read_text() == "again"
    monkeypatch.undo()
    with outputs.locked(tmp_path / ".held"), pytest.raises(Timeout):  # which is no missing lock
        outputs.take_lock(tmp_path / ".held", 0)


def test_a_writer_at_work_is_left_alone(tmp_path):
    path = tmp_path / "a.file"
    with outputs.whole_file(path) as temporary:
        temporary.write_text("first")
        save(path, "second")
        assert temporary.read_text() == "first"
    assert path.read_text() == "first"
    assert names(tmp_path) == ["a.file"]


def test_strangers_with_such_names_stay_and_a_stage_without_its_marker_goes(tmp_path):
    mine = [".a.file.subtoken-0123456", ".a.file.subtoken-01234567", "a.file.subtoken-01234567"]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text("mine")
    (tmp_path / ".a.file.subtoken-89abcdef").write_text("mine")
    (tmp_path / ".a.file.subtoken-0a1b2c3d").mkdir()
    save(tmp_path / "a.file")
    assert names(tmp_path) == sorted([*mine, ".a.file.subtoken-89abcdef", "a.file"])
    assert all((tmp_path / name / "content").read_text() == "mine" for name in mine)


def test_no_device_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(os.devnull)
    for path in tmp_path.iterdir():
        for write in (save, lambda path: outputs.check_new([path], overwrite=True)):
            refuses(r"is a (folder|pipe or a device); name a file", write, path)


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("link", "loop"):
        refuses("exists; name another file", outputs.check_new, [tmp_path / name], overwrite=False)
        save(tmp_path / name)
    assert [(tmp_path / name).read_text() for name in ("a", "link", "loop")] == ["old", "new", "new"]


def test_a_failed_block_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), outputs.stage(tmp_path / "deep" / "a"):
        raise ZeroDivisionError
    assert names(tmp_path) == []


_WRITES = re.compile(
    r"\.write_(text|bytes)\(|\bopen\([^)\n]*[\"'][wax]b?\+?[\"']|save_file\(|\.save\(|save_pretrained\(|\.to_csv\(|"
    r"\.savefig\(|torch\.save\(|json\.dump\(|copy(file|tree|2)?\(.*Path"
)
_INTO = {
    "the one place": "outputs",
    "new_folder": "artifact/fetch cli/axes evaluation/diagnostics",
    "whole_folder": "artifact/folder artifact/whole_folder cli/init datasets/english datasets/scenes",
    "whole_file": "cli/generate inference/cache_file",
    "bytes in memory": "calibrating/heads cli/fit_course evaluation/charts plugins/lmms_eval",
    "a text": "evaluation/reporting/exports evaluation/tasks/video inference/model training/trained_tensors",
    "the folder of write_merged": "families/family",
    "the folder of a checkpoint, which is renamed at the end": "training/checkpoints training/run_checkpoints",
    "a log, in room_for": "training/panels/run_progress",
}
"""Files that write, by what they write into."""


def test_nothing_is_written_beside_this_mechanism():
    package = Path(subtoken_train.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(_WRITES.search(line.partition("#")[0]) for line in path.read_text().splitlines())
    }
    known = {f"{name}.py" for names in _INTO.values() for name in names.split()}
    assert found <= known, "write through outputs.py, or say here why not"
