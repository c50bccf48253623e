"""The GPU suite: its units run at tiny shapes, what fails is recorded, goals are compared. No test is about speed."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
import torch

from benchmarks import gpu_sizes, gpu_suite, gpu_units
from tests.support.sampling import sampled

TINY = gpu_units.Settings("cpu", torch.bfloat16, gpu_sizes.QUICK)
MEASURED = [name for name in gpu_units.units(gpu_sizes.QUICK) if not name.startswith(("tests", "table8"))]
"""All but two that run what other tests are about."""


@sampled("name", MEASURED, every=6)
def test_a_unit_runs_and_states_its_goals(name):
    found = gpu_suite.run_unit(name, TINY)
    assert "error" not in found
    json.dumps(found)
    assert found["goals"]
    for goal in found["goals"]:
        assert set(goal) == {"what", "value", "bound", "met"}
        assert goal["value"] >= 0


def test_what_fails_is_recorded_and_the_others_go_on(tmp_path, capsys):
    path, written = tmp_path / "record.json", []

    def measure(name):
        written.append(json.loads(path.read_text())["units"] if path.exists() else {})
        if name == "b":
            return gpu_suite.failed("RuntimeError", "first line\nno memory")
        return {"goals": [gpu_units.goal(name, 1.0, 2.0 if name == "a" else 0.5)]}

    gpu_suite.suite(["a", "b", "c"], measure, {"units": {}}, path)
    assert [list(units) for units in written] == [[], ["a"], ["a", "b"]]  # after every unit
    assert json.loads(path.read_text())["summary"] == {"met": 1, "not_met": ["c"], "failed": ["b"]}
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in said] == ["met", "no memory", "NOT MET"]
    assert "RuntimeError" in said[1]
    gpu_suite.suite(["a"], pytest.fail, record := {"units": {"a": {"goals": []}}}, path)  # it has ended before
    assert record["summary"] == {"met": 0, "not_met": [], "failed": []}


def test_an_exception_is_an_answer(monkeypatch):
    def broken(given):
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(gpu_suite, "units", lambda sizes: {"broken": broken})
    assert gpu_suite.run_unit("broken", TINY)["error"] == {"type": "OutOfMemoryError", "message": "too much"}


def dies():
    print("bad address", file=sys.stderr, flush=True)
    os.abort()


def hangs():
    time.sleep(60)


def leaves():
    os._exit(0)


@pytest.mark.parametrize(
    ("work", "limit", "kind"), [(dies, 60, "exit code -6"), (hangs, 0.2, "TimeoutExpired"), (leaves, 60, "exit code 0")]
)
def test_a_process_that_dies_hangs_or_says_nothing(work, limit, kind):
    found = gpu_suite.isolated(work, limit)
    assert found["error"]["type"] == kind
    assert ("bad address" in found["error"]["message"]) is (work is dies)


def test_a_unit_runs_in_a_process_of_its_own(tmp_path, capsys):
    out = tmp_path / "record.json"
    assert gpu_suite.main(["--device", "cpu", "--quick", "--units", "share", "--out", str(out)]) == 0
    (name,) = json.loads(out.read_text())["units"]
    assert name == "share/128"
    assert "0 units failed" in capsys.readouterr().out


def test_a_stopped_run_goes_on_by_the_same_sources(tmp_path):
    path, header = tmp_path / "record.json", gpu_suite.header("cpu", quick=True)
    units = {"a": {"goals": []}, "b": gpu_suite.failed("RuntimeError", "no")}
    assert gpu_suite.ended(path, header) == {}
    path.write_text(json.dumps({**header, "units": units}))
    assert list(gpu_suite.ended(path, header)) == ["a"]
    assert gpu_suite.ended(path, {**header, "sources": "others"}) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no CUDA device"),
        (["--device", "cpu"], "add --quick"),
        (["--device", "cpu", "--quick"], "SUBTOKEN_KERNEL=fast"),
    ],
    ids=["cuda", "cpu", "path"],
)
def test_where_it_cannot_run_it_says_so(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if "SUBTOKEN" in words:
        monkeypatch.setenv("SUBTOKEN_KERNEL", "fast")
    assert gpu_suite.main(arguments) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.count("\n") == 1
    assert not said.out
