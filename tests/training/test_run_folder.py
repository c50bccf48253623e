"""Into which folders a run may be written, and who else may not at the same time."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from subtoken_train.errors import SubTokenWarning
from subtoken_train.outputs import whole_file
from subtoken_train.training import run_folder
from subtoken_train.training.run_folder import (
    MARKER_FILE,
    RUN,
    RunFolder,
    has_work,
    lock_run,
    new_marker,
    place_beside,
    write_run_marker,
)
from tests.support.faults import die, killed
from tests.support.run_folders import checkpoint, made_run, states


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.05)


def test_runs_without_a_marker_are_never_replaced_and_can_be_resumed(tmp_path):
    run = made_run(tmp_path / "run", marked=False)
    with pytest.raises(ValueError, match=r"runs of version 0.1 have none\), so it is never replaced"):
        RunFolder(run, place_beside(run)).check(resume=False)
    with pytest.raises(ValueError, match=r"of version 0.1.*pass --resume, or another --output_dir"):
        RunFolder(run, run).check(resume=False)
    resumed = RunFolder(run, run)
    resumed.check(resume=True)
    resumed.open(resume=True)
    resumed.close(keep=False)
    assert not (run / MARKER_FILE).exists()
    assert states(tmp_path) == {"run": "old"}


@pytest.mark.parametrize("content", ["logs/a.csv", "recipe.yaml", "checkpoints/step-3.partial/state.ckpt", "photo.png"])
def test_a_folder_that_is_no_run_stays_as_it_is(tmp_path, content):
    (tmp_path / "run" / content).parent.mkdir(parents=True)
    (tmp_path / "run" / content).write_text("mine")
    with pytest.raises(ValueError, match="holds files but is not a run"):
        RunFolder(tmp_path / "run", tmp_path / "run").check(resume=False)
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [tmp_path / "run" / content]


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK])
def test_a_run_goes_on_where_no_file_can_be_locked(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
    run = RunFolder(tmp_path / "run", tmp_path / "run")
    run.check(resume=False)
    with pytest.warns(SubTokenWarning, match="run lies on a file system without locks; it continues without one"):
        run.open(resume=False)
    assert (tmp_path / "run" / MARKER_FILE).is_file()
    run.close(keep=True)


def test_a_link_to_somebodys_folder_stays(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes").write_text("mine")
    (tmp_path / "run").symlink_to("theirs")
    run = RunFolder(tmp_path / "run", tmp_path / "run")
    with pytest.raises(ValueError, match="holds files but is not a run"):
        run.check(resume=False)
    run.close(keep=False)
    assert (tmp_path / "run").is_symlink()


def test_no_folder_has_a_name_with_a_nul():
    with pytest.raises(ValueError, match="contains a NUL character"):
        RunFolder(Path("a\0b"), Path("a\0b")).check(resume=False)


def test_a_path_through_a_folder_that_is_not_there_makes_none(tmp_path):
    run = RunFolder(tmp_path / "run" / ".." / "other", tmp_path / "run" / ".." / "other")
    with pytest.raises(ValueError, match="leads through a folder that does not exist"):
        run.check(resume=False)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_came_to_nothing_is_begun_again_in_its_folder(tmp_path):
    first = RunFolder(tmp_path / "runs" / "run", tmp_path / "runs" / "run")
    first.open(resume=False)
    (first.place / "logs" / "csv").mkdir(parents=True)
    (first.place / "logs" / "csv" / "metrics.csv").write_text("loss")
    first.close(keep=True)
    again = RunFolder(first.folder, first.folder)
    again.check(resume=False)
    again.open(resume=False)
    again.close(keep=False)
    assert (first.place / "logs" / "csv" / "metrics.csv").read_text() == "loss"


def test_a_failed_run_leaves_no_folder_that_it_made(tmp_path):
    new = RunFolder(tmp_path / "runs" / "run", tmp_path / "runs" / "run")
    new.open(resume=False)
    new.close(keep=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    new = RunFolder(tmp_path / "mine", tmp_path / "mine")
    new.open(resume=False)
    new.close(keep=False)
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("resume", [True, False])
def test_two_runs_do_not_share_a_folder(tmp_path, resume):
    run = made_run(tmp_path / "run")
    lock = lock_run(run)
    second = RunFolder(run, run if resume else place_beside(run))
    with pytest.raises(ValueError, match=r"another 'fit' is writing to .*run; wait for it"):
        second.check(resume)
    lock.release()
    second.check(resume)
    second.close(keep=True)


def test_two_first_runs_do_not_share_a_folder(tmp_path):
    first, second = (RunFolder(tmp_path / "run", tmp_path / "run") for _ in range(2))
    for new in (first, second):
        new.check(resume=False)
    first.open(resume=False)
    with pytest.raises(ValueError, match="another 'fit' is writing to"):
        second.open(resume=False)
    second.close(keep=False)
    checkpoint(first.place, "first")
    first.close(keep=True)
    with pytest.raises(ValueError, match="holds a run"):
        second.open(resume=False)


def test_the_current_folder_is_never_replaced(tmp_path, monkeypatch):
    run = made_run(tmp_path / "run")
    (run / "deeper").mkdir()
    for here in (run, run / "deeper"):
        monkeypatch.chdir(here)
        for name in (run, Path(), Path("..")):
            if run.is_relative_to(name.resolve()) or name.resolve().is_relative_to(run):
                with pytest.raises(ValueError, match=r"holds the folder you are in|no marker of a run"):
                    RunFolder(name, place_beside(name)).check(resume=False)
    assert states(tmp_path) == {"run": "old"}


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 1}', "[]"])
def test_a_broken_marker_is_worded(tmp_path, text):
    run = made_run(tmp_path / "run")
    (run / MARKER_FILE).write_text(text)
    with pytest.raises(ValueError, match=MARKER_FILE):
        RunFolder(run, place_beside(run)).check(resume=False)
    (run / MARKER_FILE).write_text('{"schema_version": 9}')
    with pytest.raises(ValueError, match="has schema 9"):
        RunFolder(run, run).check(resume=True)


def test_names_in_a_marker_lead_nowhere_else(tmp_path):
    run, other = made_run(tmp_path / "run"), made_run(tmp_path / "other")
    write_run_marker(run, new_marker(replaces=("other", "../run", "run.replaced-../../x", str(other))))
    assert RunFolder(run, run).replaced() == []
    assert RunFolder(run, run).finish() == []
    assert has_work(other)


def test_a_failed_run_leaves_a_link_to_an_empty_folder(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "run").symlink_to("theirs")
    new = RunFolder(tmp_path / "run", tmp_path / "run")
    new.check(resume=False)
    new.open(resume=False)
    new.close(keep=False)
    assert (tmp_path / "run").is_symlink()
    assert list((tmp_path / "theirs").iterdir()) == []


def test_a_link_in_the_place_of_a_temporary_file_leads_nowhere(tmp_path):
    run = made_run(tmp_path / "run")
    (tmp_path / "mine").write_text("mine")
    (run / f"{MARKER_FILE}.partial").symlink_to(tmp_path / "mine")
    write_run_marker(run, new_marker())
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (run / MARKER_FILE).is_symlink()


@pytest.mark.parametrize(
    "name", [".subtoken-run.json", "recipe.yaml", "checkpoints/step-3.partial/state.ckpt", "logs/samples-rank0.jsonl"]
)
def test_what_a_killed_write_leaves_is_part_of_the_run(tmp_path, name):
    def dying():
        with whole_file(tmp_path / name) as temporary:
            temporary.write_text("{}")
            (temporary.parent / ".tmpA1b2C3").write_text("a library's")
            die()

    assert killed(dying)
    (tmp_path / name).with_name(f".{Path(name).name}.0123abcd").write_text("what version 0.2 left")
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 4
    assert RUN.others(tmp_path) == []
    assert RUN.remove(tmp_path) == []
