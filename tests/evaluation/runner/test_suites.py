"""Suites make their own data, once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from subtoken_train.evaluation.runner import spec as suites
from subtoken_train.evaluation.runner.spec import suite


def test_processes_that_start_together_write_the_scenes_once(tmp_path, monkeypatch):
    written = []

    def write(folder, split, count, seed):
        written.append((split, count, seed))
        time.sleep(0.3)
        folder.mkdir()
        (folder / "test.json").write_text("[]")

    monkeypatch.setattr(suites, "write_scene_split", write)
    with ThreadPoolExecutor(2) as threads:
        grids = list(threads.map(lambda _: suite("mini", tmp_path), range(2)))
    assert written == [("test", suites.SCENES, 1)]
    for images, text in grids:
        assert {task.source for task in images.tasks} == {str(tmp_path / "data/scenes")}
        assert [task.source for task in text.tasks] == [None]
        assert images.out == text.out == tmp_path


def test_an_unknown_suite_is_worded(tmp_path):
    with pytest.raises(ValueError, match=r"unknown suite 'minni'.*Did you mean 'mini'"):
        suite("minni", tmp_path)
