"""Batches of like samples, each process's device; a results folder is one run's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subtoken_train.evaluation.runner.cell import ONE, Processes, alone, plan_batches
from subtoken_train.evaluation.tasks.task import Sample
from tests.support.refusals import refuses

samples = st.lists(
    st.builds(
        Sample,
        id=st.uuids().map(str),
        prompt=st.text(min_size=1, max_size=30),
        reference=st.just({}),
        choices=st.sampled_from([(), (" A", " B")]),
        max_new_tokens=st.sampled_from([8, 32]),
        stop=st.sampled_from([(), ("\n",)]),
    ),
    max_size=40,
)


@pytest.mark.slow
@given(samples, st.integers(1, 9))
def test_every_sample_is_in_one_batch_of_its_kind(asked, size):
    plan = plan_batches(asked, size)
    assert sorted(place for batch in plan for place in batch) == list(range(len(asked)))
    for batch in plan:
        assert 1 <= len(batch) <= size
        kinds = {(bool(s.choices), s.choices == () and s.max_new_tokens, s.stop) for s in (asked[i] for i in batch)}
        assert len(kinds) == 1
    assert plan == plan_batches(asked, size)


def test_long_prompts_come_first_and_together():
    asked = [Sample(str(n), "x" * n, {}) for n in (3, 9, 1, 8, 2, 7)]
    assert [[len(asked[i].prompt) for i in batch] for batch in plan_batches(asked, 2)] == [[9, 8], [7, 3], [2, 1]]


def test_the_work_is_divided():
    four = [Processes(rank, 4) for rank in range(4)]
    assert all(sum(process.mine(number) for process in four) == 1 for number in range(11))


def test_without_a_gpu_all_are_on_the_cpu_and_one_gpu_is_not_for_all(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [ONE.device(wanted) for wanted in (None, "auto", "cpu")] == ["cpu", "auto", "cpu"]
    assert (ONE.device("cuda:1"), Processes(1, 2).device("cpu")) == ("cuda:1", "cpu")
    refuses("device cuda:1 for 2 processes", Processes(0, 2).device, "cuda:1")


@pytest.mark.parametrize("wanted", [None, "auto", "cuda"])
def test_each_process_takes_its_own_gpu(monkeypatch, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # the second machine of two, with two GPUs each
    assert [Processes(rank, 4, rank % 2).device(wanted) for rank in (2, 3)] == ["cuda:0", "cuda:1"]


def test_what_names_no_device_goes_to_the_own_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    for process in (Processes(0, 2, 0), Processes(1, 2, 1), ONE):
        with process:
            pass
    assert chosen == [0, 1]


def attempt(folder, written):
    with alone(folder, ONE):
        for path, text in written:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        raise ValueError("wrong")


def fail(folder, *written):
    refuses("wrong", attempt, folder, written)


def test_a_failure_leaves_no_folder(tmp_path):
    cell = tmp_path / "results" / "new" / "arm" / "task"
    fail(tmp_path / "results" / "new", (cell / "manifest.json", "{}"), (cell / "samples-0-of-1.jsonl", ""))
    assert list(tmp_path.iterdir()) == []


def test_what_was_answered_and_what_was_there_stays(tmp_path):
    sample = tmp_path / "new" / "arm" / "task" / "samples-0-of-1.jsonl"
    fail(tmp_path / "new", (sample, "{}\n"))
    assert sample.read_text() == "{}\n"
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("mine")
    fail(tmp_path / "old")
    fail(tmp_path / "old" / "new")
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == [".lock", "notes.txt"]


def test_two_runs_are_refused_and_the_first_is_not_disturbed(tmp_path):
    with alone(tmp_path / "new", ONE):
        with pytest.raises(ValueError, match="another evaluation is writing to"), alone(tmp_path / "new", ONE):
            pass
        assert (tmp_path / "new").is_dir()
    assert (tmp_path / "new").is_dir()
