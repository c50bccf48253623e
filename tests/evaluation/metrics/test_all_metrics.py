"""What every task's metric must do: score in parts as it scores at once."""

from importlib.util import find_spec

import pytest

from subtoken_train.evaluation.tasks import TASKS, build_task, captions
from tests.support.benchmark_folders import CASES

MATHEMATICS = ("aime25", "math500")
SCORED = {name: cases for name, cases in CASES.items() if find_spec("math_verify") or name not in MATHEMATICS}


def words(rows):
    """In the place of the captions' tokenizer, which is a Java program."""
    return [[text.lower() for text in row] for row in rows]


@pytest.fixture(autouse=True)
def no_java(monkeypatch):
    monkeypatch.setattr(captions, "ptb_tokens", words)


def metric_of(name):
    if name not in SCORED:
        pytest.skip("math-verify is not installed")
    return build_task(name).metric()


def fed(name, cases, batch=2):
    metric = metric_of(name)
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
