"""The metric of benchmarks for a judge says what was answered, and nothing else."""

from subtoken_train.evaluation.metrics.short_answers import Answered


def test_share_of_answers():
    metric = Answered()
    metric.update(["A", " ", "", "no idea"], [{}] * 4)
    assert {name: float(value) for name, value in metric.compute().items()} == {"answered": 0.5}
