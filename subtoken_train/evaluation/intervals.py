"""Bootstrap intervals over questions, and over training seeds where there are several.

Legend: s seeds, n questions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000


def bootstrap_interval(
    scores: Sequence[float] | npt.NDArray[np.float64], level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean of ``scores``, resampled with replacement.

    Args:
        scores: one per question, [n], or per training seed and question, [s, n]. Of several seeds, seeds *and*
            questions are resampled, so the interval holds the spread between trainings too; with few seeds it is a
            rough one. For a paired comparison pass differences: both arms then meet the same seeds and questions.
        level: coverage.
        seed: of the resampling.

    Raises:
        ValueError: there are no scores.
    """
    values_sn = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    if not values_sn.size:
        raise ValueError("no scores to resample")
    num_seeds, num_questions = values_sn.shape
    rng = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        weight_s = np.bincount(rng.integers(0, num_seeds, num_seeds), minlength=num_seeds) / num_seeds
        weight_n = np.bincount(rng.integers(0, num_questions, num_questions), minlength=num_questions) / num_questions
        means[i] = weight_s @ values_sn @ weight_n
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
