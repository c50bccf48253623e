"""Accuracy by log-likelihood."""

from subtoken_train.evaluation.metrics.likelihoods import MultipleChoice
from tests.support.vqa_cases import reference_cases


def test_the_first_of_the_likeliest_is_chosen():
    assert MultipleChoice.score([-2.0, -1.0, -1.0, -3.0], {"answer": 1}) == 1
    assert MultipleChoice.score([-2.0, -1.0, -1.0, -3.0], {"answer": 2}) == 0
    metric = MultipleChoice()
    metric.update([[-1.0, -2.0], [-1.0, -2.0], [-3.0, -2.0]], [{"answer": 0}, {"answer": 1}, {"answer": 1}])
    assert metric.compute()["accuracy"].item() == 2 / 3


def test_reference_items(shared):
    cases = reference_cases(shared, "mmlu")
    assert len(cases) >= 25
    for case in cases:
        score = MultipleChoice.score(case["loglikelihoods"], {"answer": case["doc"]["answer"]})
        assert score == case["lm_eval_result"]["acc"]
