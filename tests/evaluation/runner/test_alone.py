"""A results folder is one run's at a time, and what answers nothing leaves none."""

from __future__ import annotations

import pytest

from subtoken_train.evaluation.runner.processes import ONE, alone


def attempt(folder, written):
    with alone(folder, ONE):
        for path, text in written:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        raise ValueError("wrong")


def fail(folder, *written):
    with pytest.raises(ValueError, match="wrong"):
        attempt(folder, written)


def test_a_failure_leaves_no_folder(tmp_path):
    cell = tmp_path / "results" / "new" / "arm" / "task"
    fail(tmp_path / "results" / "new", (cell / "manifest.json", "{}"), (cell / "samples-0-of-1.jsonl", ""))
    assert list(tmp_path.iterdir()) == []


def test_what_was_answered_stays(tmp_path):
    sample = tmp_path / "new" / "arm" / "task" / "samples-0-of-1.jsonl"
    fail(tmp_path / "new", (sample, "{}\n"))
    assert sample.read_text() == "{}\n"


def test_what_was_there_stays(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("mine")
    fail(tmp_path / "old")
    fail(tmp_path / "old" / "new")
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == [".lock", "notes.txt"]


def test_two_runs_are_refused_and_the_first_is_not_disturbed(tmp_path):
    with alone(tmp_path / "new", ONE):
        with pytest.raises(ValueError, match="another evaluation writes into"), alone(tmp_path / "new", ONE):
            pass
        assert (tmp_path / "new").is_dir()
    assert (tmp_path / "new").is_dir()
