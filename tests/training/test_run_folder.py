"""Into which folders a run may be written, who else may not at the same time, and where a run goes that is replaced."""

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from subtoken_train.cli.command_line import check_output
from subtoken_train.errors import SubTokenWarning
from subtoken_train.training import run_folder
from tests.support.refusals import refuses
from tests.support.run_folders import begun, checkpoint, content, kill_in, made_run, opened, states


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 0.05)


@pytest.mark.parametrize("marked", [True, False], ids=["", "of version 0.1"])
@pytest.mark.parametrize("link", [False, True])
def test_a_run_that_is_replaced_keeps_all_its_files_under_the_next_free_name(tmp_path, marked, link):
    run = made_run(tmp_path / "disk" / "run", marked=marked)
    name = tmp_path / "link" if link else run
    if link:
        name.symlink_to(run)
    old = content(run)
    for number, text in enumerate(("new", "newer"), start=1):
        new = begun(name)
        assert new.said() == f"the run that was there is in {run}.{number}"
        checkpoint(run, text)
        new.close(keep=True)
    assert states(run.parent) == {"run": "newer", "run.1": "old", "run.2": "new"}
    assert {path: text for path, text in content(tmp_path / "disk" / "run.1").items() if path.name != ".lock"} == old
    assert name.is_symlink() == link


def test_a_name_that_is_taken_is_left_alone(tmp_path):
    made_run(tmp_path / "run")
    (tmp_path / "run.1").symlink_to("nowhere")
    begun(tmp_path / "run").close(keep=True)
    assert states(tmp_path) == {"run.2": "old"}


def test_a_run_without_a_step_gives_the_name_back_and_one_with_steps_keeps_its_logs(tmp_path):
    run = made_run(tmp_path / "run")
    old = content(run)
    for keep in (False, True):
        new = begun(run)
        (run / "logs").mkdir()
        (run / "logs" / "metrics.csv").write_text("loss")
        new.close(keep)
        assert states(tmp_path) == {"run.1" if keep else "run": "old"}
        assert keep or {path: text for path, text in content(run).items() if path.name != ".lock"} == old
    assert (run / "logs" / "metrics.csv").read_text() == "loss"


def test_what_somebody_put_beside_a_failed_run_stays(tmp_path):
    new = begun(made_run(tmp_path / "run"))
    (tmp_path / "run" / "notes.txt").write_text("mine")
    new.close(keep=False)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert states(tmp_path) == {"run.1": "old"}


def test_a_kill_at_any_step_loses_nothing_and_the_next_run_begins(tmp_path):
    for number in range(1, 50):
        run = made_run(tmp_path / str(number) / "run")
        if not kill_in(number, lambda run=run: begun(run).close(keep=True)):
            break
        assert list(states(run.parent).values()) == ["old"], number
        assert [path.read_text() for path in run.parent.rglob("notes.txt")] == ["old"]
        opened(run, run_folder.has_work(run)).close(keep=True)
        assert list(states(run.parent).values()) == ["old"], number
        assert run_folder.read_run_marker(run) is not None
    assert number > 4


@pytest.mark.parametrize("content", ["logs/a.csv", "recipe.yaml", "checkpoints/step-3.partial/state.ckpt", "photo.png"])
def test_a_folder_that_is_no_run_stays_as_it_is(tmp_path, content):
    (tmp_path / "run" / content).parent.mkdir(parents=True)
    (tmp_path / "run" / content).write_text("mine")
    (tmp_path / "link").symlink_to("run")
    for name in ("run", "link"):
        run = run_folder.RunFolder(tmp_path / name)
        refuses("holds files but is not a run", run.check, resume=False)
        run.close(keep=False)
    assert [path for path in (tmp_path / "run").rglob("*") if path.is_file()] == [tmp_path / "run" / content]


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("a\0b", "contains a NUL character"),
        ("run/../other", "leads through a folder that does not exist"),
        ("file", "file is a file; choose another --output_dir"),
        ("done", "holds a run; pass --overwrite, --resume, or another --output_dir"),
    ],
)
def test_folders_that_are_refused(tmp_path, folder, words):
    (tmp_path / "file").touch()
    made_run(tmp_path / "done")
    before = sorted(tmp_path.iterdir())
    refuses(words, lambda: run_folder.RunFolder(tmp_path / Path(folder)).check(resume=False))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("here", "name"), [("run", "."), ("run", ""), ("run/logs", ".."), (".", "")])
def test_neither_the_current_folder_nor_a_mount_point_is_renamed(tmp_path, monkeypatch, here, name):
    run = made_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path / here)
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "run")
    with pytest.raises(ValueError, match="mount point and cannot be" if here == "." else "holds the folder you are in"):
        run_folder.RunFolder(Path(name) if name else run, replaces=True).check(resume=False)


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK])
def test_a_run_goes_on_where_no_file_can_be_locked(tmp_path, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(number, os.strerror(number))))
    run = run_folder.RunFolder(tmp_path / "run")
    with pytest.warns(SubTokenWarning, match="run lies on a file system without locks; it continues without one"):
        run.open(resume=False)
    assert (tmp_path / "run" / run_folder.MARKER_FILE).is_file()
    run.close(keep=True)


def test_a_run_that_came_to_nothing_is_begun_again_in_its_folder(tmp_path):
    run = tmp_path / "runs" / "run"
    first = run_folder.RunFolder(run)
    first.open(resume=False)
    (run / "logs" / "csv").mkdir(parents=True)
    (run / "logs" / "csv" / "metrics.csv").write_text("loss")
    first.close(keep=True)
    opened(run).close(keep=False)
    assert (run / "logs" / "csv" / "metrics.csv").read_text() == "loss"


@pytest.mark.parametrize("there", ["nothing", "folder", "link"])
def test_a_failed_run_leaves_no_folder_that_it_made(tmp_path, there):
    if there != "nothing":
        (tmp_path / "theirs").mkdir()
    if there == "link":
        (tmp_path / "link").symlink_to("theirs")
    before = sorted(tmp_path.rglob("*"))
    opened(tmp_path / {"nothing": "runs/run", "folder": "theirs", "link": "link"}[there]).close(keep=False)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_at_work_is_neither_resumed_nor_renamed(tmp_path, resume):
    run = made_run(tmp_path / "run")
    lock = run_folder.lock_run(run)
    second = run_folder.RunFolder(run, replaces=not resume)
    refuses(r"another 'fit' is writing to .*run; wait for it", second.check, resume)
    lock.release()
    second.check(resume)
    second.close(keep=True)


def test_two_first_runs_do_not_share_a_folder(tmp_path):
    first, second = (run_folder.RunFolder(tmp_path / "run") for _ in range(2))
    for new in (first, second):
        new.check(resume=False)
    first.open(resume=False)
    refuses("another 'fit' is writing to", second.open, resume=False)
    second.close(keep=False)
    checkpoint(tmp_path / "run", "first")
    first.close(keep=True)
    refuses("holds a run", second.open, resume=False)


@pytest.mark.parametrize("text", ["", "{", '{"schema_version": 1}', "[]", '{"schema_version": 9}'])
def test_a_broken_marker_is_worded(tmp_path, text):
    run = made_run(tmp_path / "run")
    (run / run_folder.MARKER_FILE).write_text(text)
    for resume in (True, False):
        words = "has schema 9" if "9" in text else run_folder.MARKER_FILE
        refuses(words, run_folder.RunFolder(run, replaces=not resume).check, resume)


def test_the_marker_of_a_run_that_took_anothers_place_is_read(tmp_path):
    """Versions before this one swapped a running folder, and noted so."""
    old = {"version": "0.3", "created": "x", "job": "7", "staged": "run.new-0", "replaces": ["a"], "schema_version": 1}
    (tmp_path / run_folder.MARKER_FILE).write_text(json.dumps(old))
    assert run_folder.read_run_marker(tmp_path).job == "7"


@pytest.mark.parametrize(
    ("restarts", "job", "overwrite", "again"),
    [("0", "7", False, False), ("1", "7", False, True), ("1", "7", True, True), ("1", "8", True, False)],
)
def test_a_requeued_job_goes_on_with_its_own_work_alone(tmp_path, monkeypatch, restarts, job, overwrite, again):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run = made_run(tmp_path / "run")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    assert run_folder.requeued_with_work(run, overwrite) == again
    assert not check_output(str(run))  # fit asks only once all is loaded
