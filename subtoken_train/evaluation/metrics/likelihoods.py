"""Scores of log-likelihoods: the perplexity of texts, and choices.

Sources: perplexity as lm-eval defines it; MMLU (Hendrycks et al., arXiv:2009.03300) as lm-evaluation-harness scores it,
metric ``acc``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from subtoken_train.evaluation.metrics.metric import MeanScores, Prediction, TaskMetric


class Perplexity(TaskMetric):
    """``word_perplexity``, ``byte_perplexity`` and ``bits_per_byte`` of scored texts, lower is better.

    With L the sum of log-likelihoods in nats: exp(-L / words), exp(-L / bytes) and -L / bytes / ln 2. None of them
    depends on how a tokenizer cuts the text. A reference holds ``words`` and ``bytes`` of the scored text, a prediction
    its one log-likelihood. ``score`` is the geometric mean of a byte's probability, 1 / byte perplexity of the sample.
    """

    higher_is_better = False
    points = frozenset({"word_perplexity", "byte_perplexity", "bits_per_byte"})

    def compute(self) -> dict[str, float]:
        parts = [(_only(said), of["words"], of["bytes"]) for said, of in self.rows]
        nats, words, octets = map(sum, zip(*parts, strict=True))
        return {
            "word_perplexity": math.exp(-nats / words),
            "byte_perplexity": math.exp(-nats / octets),
            "bits_per_byte": -nats / octets / math.log(2),
        }

    @staticmethod
    def score(prediction: Any, reference: Mapping[str, Any]) -> float:
        return math.exp(_only(prediction) / reference["bytes"])


def _only(prediction: Prediction) -> float:
    assert isinstance(prediction, list)
    (value,) = prediction
    return value


class MultipleChoice(MeanScores):
    """``accuracy``: the share of questions whose likeliest choice is right; among equals the first counts as chosen.

    Likelihoods are taken as they are, not divided by length. A reference holds ``answer``, the right choice's index.
    """

    names = ("accuracy",)

    @staticmethod
    def figures(prediction: list[float], reference: Mapping[str, Any]) -> dict[str, float]:
        return {"accuracy": float(prediction.index(max(prediction)) == reference["answer"])}
