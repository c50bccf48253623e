"""What every task's metric must do: score in parts and over processes as it scores at once."""

import os
from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from subtoken_train.evaluation.tasks import TASKS, build_task, captions
from tests.support.benchmark_folders import CASES
from tests.support.eval_runs import free_port

SCORED = {name: cases for name, cases in CASES.items() if find_spec("math_verify") or name not in ("aime25", "math500")}


def words(rows):
    """In the place of the captions' tokenizer, which is a Java program."""
    return [[text.lower() for text in row] for row in rows]


@pytest.fixture(autouse=True)
def no_java(monkeypatch):
    monkeypatch.setattr(captions, "ptb_tokens", words)


def fed(name, cases, batch=2):
    if name not in SCORED:
        pytest.skip("math-verify is not installed")
    metric = build_task(name).metric()
    for start in range(0, len(cases), batch):
        predictions, references = zip(*cases[start : start + batch], strict=True)
        metric.update(list(predictions), list(references))
    return metric


def test_every_task_has_cases():
    assert CASES.keys() == TASKS.keys()


@pytest.mark.parametrize("name", TASKS)
class TestEach:
    def test_the_primary_score_is_there_and_fractions_are(self, name):
        metric = fed(name, CASES[name])
        scores = metric.compute()
        assert TASKS[name].primary in scores
        assert all(0 <= value <= 1 for score, value in scores.items() if score not in metric.points)

    def test_the_order_and_the_batches_do_not_count(self, name):
        expected = fed(name, CASES[name]).compute()
        assert fed(name, CASES[name][::-1], batch=3).compute() == pytest.approx(expected, abs=1e-12)
        metric = fed(name, CASES[name][:1])
        metric.reset()
        metric.update(*map(list, zip(*CASES[name], strict=True)))
        assert metric.compute() == pytest.approx(expected, abs=1e-12)


def one_of_two(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    captions.ptb_tokens = words
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = {
        name: {
            "halves": fed(name, cases[rank::2]).compute(),
            "uneven": fed(name, cases[:1] if rank else cases[1:]).compute(),
            "all in one": fed(name, cases if rank else []).compute(),
        }
        for name, cases in SCORED.items()
    }
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric:UserWarning")  # of a process without samples
def test_two_processes_score_as_one(tmp_path):
    torch.multiprocessing.spawn(one_of_two, (free_port(), tmp_path), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for name, cases in SCORED.items():
        expected = pytest.approx(fed(name, cases).compute(), abs=1e-12)
        for rank in (0, 1):
            assert all(scores == expected for scores in found[rank][name].values()), name
